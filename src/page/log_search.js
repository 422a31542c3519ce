// ---- Search in a log, by the service, which reads all of it in parts

const SEARCHED_BYTES = 2 ** 28;                 // that one answer searches
const MOST_FOUND = 10000;                       // lines that are listed
let search = null;                              // {text, found: [number of a line], at: which is shown, next, ...}

function openSearch() {
  byId('search').hidden = false;
  byId('to-search').setAttribute('aria-expanded', true);
  byId('log').scrollIntoView({block: 'nearest'});
  byId('search-text').select();
  byId('search-text').focus();
}

function forgetSearch() {
  search?.asking.abort();
  search = shownLine = null;
  show(byId('search-state'));
  markLines();
  globalThis.CSS?.highlights?.delete('found');
}

function endSearch() {
  forgetSearch();
  byId('search-text').value = '';
  byId('search').hidden = true;
  byId('to-search').setAttribute('aria-expanded', false);
}

async function startSearch(text) {              // the same text once more: the line that is shown stays
  const former = search?.text === text ? search.found[search.at] : null, hasFormer = isSet(former), {id} = log;
  search?.asking.abort();
  const mine = search = {text, found: [], at: -1, next: '0', searched: 0, total: 0, asking: new AbortController()};
  while (search === mine && mine.next && mine.found.length < MOST_FOUND) {
    describeSearch();
    try {
      await searchPart(mine, id);
    } catch (error) {
      if (search !== mine) return;
      mine.problem = error.message;
      break;
    }
    if (search === mine && mine.at < 0 && !hasFormer) await stepSearch(1);
  }
  if (search !== mine) return;
  mine.isDone = true;
  if (mine.at < 0) mine.at = mine.found.indexOf(former);
  describeSearch();
  describeLog();
  if (await findFirst()) markLines();
}

async function searchPart(mine, id) {
  const take = ({line, text}) => {              // lines that stand together come together
    for (let each = line; each < line + countLines(text); each += 1) {
      if (mine.found.at(-1) !== each) mine.found.push(each);
    }
    return mine.found.length < MOST_FOUND;
  };
  const query = {grep: mine.text, numbers: true, offset: mine.next};
  const {answer} = await askLog(id, query, {signal: mine.asking.signal, as: (reply) => readEntries(reply, take)});
  const sum = (offsets) => offsets.split(',').reduce((bytes, offset) => bytes + Number(offset), 0);
  mine.next = answer.headers.get('Log-Next');
  mine.total = sum(answer.headers.get('Log-End'));
  mine.searched = mine.next ? sum(mine.next) : mine.total;
}

async function readEntries(answer, take) {      // as they come, until take() wants no more
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = '', isOn = true; isOn;) {
    const {done, value = ''} = await reader.read(), lines = (rest + value).split('\n');
    rest = lines.pop();
    isOn = lines.every((line) => take(JSON.parse(line))) && !done;
  }
  await reader.cancel();
}

function describeSearch() {
  const {found, at, next, searched, total, isDone, problem} = search, bytes = (count) => size(count / 2 ** 20);
  const isCut = found.length >= MOST_FOUND, lines = `${isCut ? 'the first ' : ''}${counted(found.length, 'line')}`;
  const far = next && `${bytes(searched)} of ${bytes(total)} searched`;
  let state = isDone ? 'nothing found' : 'searching \u2026';
  if (found.length) state = at >= 0 ? `${number(at + 1)} of ${lines}` : lines;
  show(byId('search-state'), listed(problem, state, !isCut && total > 0 && far));
  byId('previous').disabled = byId('next').disabled = !found.length;
}

async function stepSearch(by) {
  const {found, at} = search;
  if (!found.length) return;
  search.at = at < 0 ? 0 : (at + by + found.length) % found.length;
  describeSearch();
  await goToLine(found[search.at]);
}

function markWords(nodes) {                     // the text that is looked for; older browsers mark only its lines
  if (!globalThis.CSS?.highlights) return;
  const text = search?.text ?? '', isExact = text !== text.toLowerCase(), highlight = new Highlight();
  for (const node of nodes) {
    const walker = document.createTreeWalker(node, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const {currentNode: piece} = walker, lower = piece.data.toLowerCase();
      const words = isExact || lower.length !== piece.length ? piece.data : lower;      // \u0130 becomes two letters
      if (piece.parentNode.className === 'number') continue;
      for (let at = words.indexOf(text); at >= 0; at = words.indexOf(text, at + text.length)) {
        const range = new Range();
        range.setStart(piece, at);
        range.setEnd(piece, at + text.length);
        highlight.add(range);
      }
    }
  }
  CSS.highlights.set('found', highlight);
}

byId('to-search').onclick = () => byId('search').hidden ? openSearch() : endSearch();
byId('end-search').onclick = () => { endSearch(); byId('to-search').focus(); };
byId('next').onclick = () => search && stepSearch(1);
byId('previous').onclick = () => search && stepSearch(-1);
byId('again').onclick = () => startSearch(search.text);
byId('search-text').oninput = ({target}) => target.value || forgetSearch();
byId('search').onsubmit = (event) => {
  const text = byId('search-text').value;
  event.preventDefault();
  if (text && text === search?.text && search.found.length) stepSearch(1);
  else if (text && log) startSearch(text);
};
byId('search').onkeydown = (event) => {
  const isBack = event.key === 'Enter' && event.shiftKey && search?.text === byId('search-text').value;
  if (event.key !== 'Escape' && !isBack) return;
  event.preventDefault();
  if (isBack) return stepSearch(-1);
  endSearch();
  box.focus();
};
