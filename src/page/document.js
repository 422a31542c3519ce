// ---- The document.  Every text becomes a text node; innerHTML is not used.

const byId = (id) => document.getElementById(id);
const el = (tag, facts, ...children) => fill(document.createElement(tag), facts, children);
const svg = (tag, facts, ...children) =>        // of a picture
  fill(document.createElementNS('http://www.w3.org/2000/svg', tag), facts, children);
function fill(node, facts = {}, children = []) {        // keys and handlers become properties; false, null: left out
  for (const [name, fact] of Object.entries(facts)) {
    if (name === 'key' || name.startsWith('on')) node[name] = fact;
    else if (isSet(fact) && fact !== false) node.setAttribute(name, fact === true ? '' : fact);
  }
  node.append(...children.flat(3).filter((child) => isSet(child) && child !== false && child !== ''));
  return node;
}

const button = (text, onclick, facts = {}) => el('button', {type: 'button', onclick, key: text, ...facts}, text);
const action = (text, name, onclick, facts) =>  // a button of a row; a phone has no room for what is `quiet`
  button(text, onclick, {class: 'quiet', 'aria-label': `${text} ${name}`, ...facts});
const banner = (kind, text) => text && el('p', {class: `banner ${kind}`, key: text}, worded(text));
const muted = (text) => text && el('span', {class: 'muted'}, text);
const badge = (word, text = word) => el('span', {class: `badge ${KINDS[word] ?? ''}`}, text);
const section = (id, title, note, ...content) => el('section', {id, 'aria-label': title},
  el('div', {class: 'head'}, el('h2', {}, title), el('span', {class: 'muted', id: `${id}-count`}, note)), ...content);

// Everything is drawn anew each time, and only differences are applied: rows are kept, moved and updated, so that the
// focus, a selection and the scroll position survive.
function show(parent, ...children) {
  const focused = document.activeElement, hadFocus = parent.contains(focused), rows = hadFocus ? listRows(focused) : [];
  sync(parent, el('div', {}, ...children));
  if (!hadFocus) return;
  const isThere = (node) => node?.isConnected && !node.disabled && node.checkVisibility();
  const others = rows.filter(isThere).flatMap((row) => {        // in each the same button, or else what comes first
    const nodes = [...row.querySelectorAll('a, button')];
    return [nodes.find(({key}) => key && key === focused.key), ...nodes];
  });
  const next = [focused, ...others, byId('job').querySelector('h1'), byId('main')].find(isThere);
  next.focus({preventScroll: true});            // what was moved has lost it
}

function listRows(node) {                       // the row it is in, then those after it and before it; then its list's
  const rows = [];
  for (let row = node.closest('.use, li'); row; row = row.parentElement.closest('.use, li')) {
    const all = [...row.parentElement.children], index = all.indexOf(row);
    rows.push(row, ...all.slice(index + 1), ...all.slice(0, index).reverse());
  }
  return rows;
}

function sync(parent, fresh) {                  // children with the same tag, id and key are the same
  const left = [...parent.childNodes];
  const wanted = [...fresh.childNodes].map((child) => {
    const index = left.findIndex((node) => ['nodeName', 'id', 'key'].every((name) => node[name] === child[name]));
    if (index < 0) return child;
    const [node] = left.splice(index, 1);
    update(node, child);
    return node;
  });
  for (const node of left) node.remove();
  let next = parent.firstChild;
  for (const node of wanted) {
    if (node === next) next = next.nextSibling;
    else parent.insertBefore(node, next);
  }
}

function update(node, fresh) {
  if (node.nodeType === Node.TEXT_NODE) {       // an equal text is not touched: a selection in it survives
    if (node.data !== fresh.data) node.data = fresh.data;
    return;
  }
  for (const name of new Set([...node.getAttributeNames(), ...fresh.getAttributeNames()])) {
    const value = fresh.getAttribute(name);
    // its reader opens and closes it; fitNames() sets the style
    if (['open', 'style'].includes(name) || node.getAttribute(name) === value) continue;
    if (value === null) node.removeAttribute(name);
    else node.setAttribute(name, value);
  }
  node.onclick = fresh.onclick;
  sync(node, fresh);
}
