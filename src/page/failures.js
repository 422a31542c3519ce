// ---- Failures stay until their reader dismisses them, or they are retried.  Those of a group are one line.

function dismiss(choice, isUndone = false) {
  const done = ({ids}) => `${counted(ids.length, 'failure')} ${isUndone ? 'shown again' : 'dismissed'}.`;
  return act('POST', 'jobs/dismiss', {...choice, undo: isUndone}, done, complain, {},
    isUndone ? null : ({ids}) => dismiss({ids}, true));
}

const hasLogLinks = matchMedia('(min-width: 701px)');       // a phone has room for one link, which leads to the error
let areFailuresOpen = false;                    // all of them are shown

function foldFailures(isOpen) {
  areFailuresOpen = isOpen;
  draw();
}

function drawFailures() {
  const drawFailure = ([id, count, kinds]) => {
    const job = view.jobs[id], {group} = job, isMany = count > 1, key = group ? `group ${group}` : `job ${id}`;
    const what = isMany ? `${counted(count, 'failure')} of ${key}` : `job ${id}`;
    const note = isMany && el('a', {class: 'clip', href: groupAddress(group, 'failed')},
      `+${count - 1} of ${group}${kinds > 1 ? `, ${kinds} kinds` : ''}`);
    const actions = [
      hasLogLinks.matches
        && el('a', {href: `${addressOf(id)}?at=error`, 'aria-label': `Log of ${titleOf(job)}`}, 'Log'),
      button(isMany ? 'Retry failed' : 'Retry', () => retry(isMany ? {group} : {ids: [id]}),
        {key: 'retry', 'aria-label': `Retry ${what}`}),
      button('\u00d7', () => dismiss(isMany ? {group, status: 'failed'} : {ids: [id]}),
        {'aria-label': `Dismiss ${what}`, title: `Dismiss ${what}`})];
    return el('li', {key, class: 'bad', 'data-job': id}, drawLine(JOB_COLUMNS, job,
      {note, actions, at: hasLogLinks.matches ? '' : '?at=error'}));
  };
  const {failures, found} = view, shown = areFailuresOpen ? failures : failures.slice(0, SHOWN_FAILURES);
  const left = found.failures - shown.reduce((sum, [, count]) => sum + count, 0);
  return el('section', {id: 'failures', 'aria-label': 'Failures'}, shown.length > 0 && el('ul', {class: 'rows panel'},
    shown.map(drawFailure),
    failures.length > 1 && el('li', {class: 'bad', key: 'all'}, el('span', {class: 'grow'}),
      left > 0 && (shown.length < failures.length
        ? button(`${number(left)} more`, () => foldFailures(true), {class: 'link', 'aria-expanded': 'false'})
        : el('a', {href: '#/?status=failed'}, `${number(left)} more`)),
      areFailuresOpen && failures.length > SHOWN_FAILURES
        && button('Show fewer', () => foldFailures(false), {class: 'link', 'aria-expanded': 'true'}),
      button(`Dismiss all ${number(found.failures)}`, () => dismiss({status: 'failed'}), {class: 'link'}))));
}
