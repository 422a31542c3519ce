// ---- The token, kept for this tab only

let tokenDialog = null;                         // resolved when it is closed
const getToken = () => sessionStorage.getItem('nexus-token');

function keepToken(text) {
  if (text) sessionStorage.setItem('nexus-token', text);
  else sessionStorage.removeItem('nexus-token');
  byId('forget').hidden = !text;
  for (const form of byId('calls').querySelectorAll('form')) form.oninput();    // the curl command shows the token
}

async function askForToken({message, hint}) {
  const advice = getToken() && hint || 'nexus token create makes one; the owner\u2019s is in ~/.nexus/token.';
  const field = el('input', {id: 'token', type: 'password', autocomplete: 'off', spellcheck: 'false', autofocus: true,
    required: true, pattern: '\\s*[!-~]+\\s*', title: 'A token has no spaces and only ASCII letters.'});
  const onsubmit = () => keepToken(field.value.trim());
  keepToken('');
  showConnection('', 'token needed');
  await openDialog('A token for this service', el('form', {id: 'login', method: 'dialog', onsubmit},
    el('p', {class: 'muted', role: 'alert'}, sentences({message, hint: advice})),
    el('label', {for: 'token'}, 'Token'), field,
    el('p', {class: 'small muted'}, 'It is kept for this tab alone, until the tab is closed.'),
    el('button', {class: 'primary'}, 'Continue')));
  tokenDialog = null;
}

byId('forget').onclick = () => { keepToken(''); location.reload(); };
