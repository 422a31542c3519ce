// ---- Notices in the corner: what was done, and what failed

function tell(text, undo, label = 'Undo') {     // undo: takes it back, or does what the label says
  const notice = el('div', {}, el('div', {class: 'grow'}, text),
    undo && button(label, () => { notice.remove(); undo(); }, {class: 'link'}));
  byId('notices').append(notice);
  setTimeout(() => notice.remove(), undo ? UNDO_MS : 6000);
}

function complain({message, hint, status}) {    // it stays until it is closed
  if (status === 401) return;                   // the token dialog says it
  const [text, advice] = isSet(status) ? [message, hint]
    : [`An error in this page: it may not show everything (${message}).`, 'Load it again.'];
  const notice = el('div', {class: 'bad', role: 'alert'},
    el('div', {class: 'grow'}, el('strong', {}, text), el('div', {}, advice)),
    button('Close', () => notice.remove(), {class: 'link'}));
  for (const old of [...byId('notices').children]) if (old.textContent === notice.textContent) old.remove();
  byId('notices').append(notice);
}

addEventListener('error', ({error}) => error && complain(error));
addEventListener('unhandledrejection', ({reason}) => complain(reason));
