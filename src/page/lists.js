// ---- The lists: what waits and what has ended.  A group is one row with a bar, and a link to its jobs.

function drawLists() {
  const {found, waiting, ended, counts} = view, {status, group} = filter;
  const wants = (...words) => !status || words.includes(status);
  const hasResults = view.groups[group] && !status && !filter.text;
  const chip = (text, isOn, change) => button(text, () => { location.hash = listAddress({...filter, ...change}); },
    {'aria-pressed': `${isOn}`});
  return el('div', {id: 'lists'}, isFiltered() && el('div', {class: 'head', key: 'chips'},
    ['running', 'pending', ...FINAL].map((word) => chip(word === 'pending' ? 'waiting' : word, word === status,
      {status: word === status ? '' : word})),
    group && chip(`group ${group} \u00d7`, true, {group: ''}), el('a', {href: '#/'}, 'Show all')),
  view.groups[group] && el('ul', {class: 'rows panel', key: 'group'}, drawGroup(view.groups[group])),
  !group && found.groups.length > 0 && section('named', 'Groups', null, el('ul', {class: 'rows panel'},
    found.groups.map((name) => drawGroup(view.groups[name])))),
  hasResults ? drawResults(view.groups[group]) : [
    found.running?.length > 0 && wants('running')
      && drawList('running', 'Running', found.running, found.running.length),
    wants('pending') && drawList('waiting', 'Waiting', waiting, found.waiting, 'Nothing waits.', counts.pending),
    wants(...FINAL) && drawList('ended', 'Ended', ended, found.ended,
      found.failures ? 'No other job has ended yet.' : 'No job has ended yet.',
      FINAL.reduce((sum, word) => sum + counts[word], 0), !isFiltered() && found.failures)]);
}

// `total`: rows, of which entries are the first.  `jobs`: how many those are; `above`, of them, failures.
function drawList(id, title, entries, total, empty, jobs = total, above = 0) {
  const left = total - entries.length;
  const rows = entries.map((entry, index) => {
    const job = view.jobs[entry], reason = job?.waiting_for;
    const isSame = reason && reason === view.jobs[entries[index - 1]]?.waiting_for;
    return job ? drawJob(job, isSame ? 'as above' : reason) : drawGroup(view.groups[entry.slice('group:'.length)]);
  });
  const count = isFiltered() ? total : jobs, settled = total - countFailures();
  return section(id, title, listed(count > 0 && number(count), above > 0 && `${counted(above, 'failure')} above`,
    filter.status === 'failed' && settled > 0 && `${number(settled)} run again or dismissed`),
  el('div', {class: 'panel'},
    rows.length ? el('ul', {class: 'rows'}, rows)
      : el('p', {class: 'pad muted'}, isFiltered() ? 'No job matches the filter.' : empty),
    left > 0 && el('p', {class: 'pad'}, button(`Show ${Math.min(PAGE, left)} more of ${number(left)}`,
      () => { limit += PAGE; restart(); }, {class: 'link'}))));
}

// Of those that have failed: which were neither retried nor dismissed.  NaN: of a text nobody counts them.
const countFailures = () => filter.text ? NaN
  : filter.group ? view.groups[filter.group]?.failures : view.found.failures;

function drawJob(job, reason) {
  const {id, status, group} = job, name = `job ${id}`;
  const note = [group && !filter.group && el('a', {class: 'muted', href: groupAddress(group)}, group),
    isRunning(job) && muted(where(job))];
  const actions = isSet(job.command) && [job.is_held && holdButton(job),
    !isOver(job) && action('Cancel', name, () => cancelJob(job), {disabled: Boolean(job.stopping)}),
    job.is_dismissed && action('Show again', name, () => dismiss({ids: [id]}, true)),
    isOver(job) && status !== 'completed' && action('Retry', name, () => retry({ids: [id]}))];
  return el('li', {key: id, 'data-job': id}, drawLine(JOB_COLUMNS, job, {note, reason, actions}));
}

function drawGroup(group) {
  const {name, hold, estimated_end: end, failures} = group, isOn = group.pending + group.running > 0;
  const total = ['completed', 'running', 'failed', 'cancelled', 'pending']
    .reduce((sum, status) => sum + group[status], 0);
  const parts = [['completed', group.completed], ['running', group.running], ['failed', failures],
    ['cancelled', group.cancelled], ['pending', group.pending, 'waiting'],
    ['failed', group.failed - failures, 'run again or dismissed', '']].filter(([, count]) => count > 0);
  const ended = total - group.pending - group.running, label = `group ${name}`, far = group.fraction;
  const kind = filter.group ? null : 'quiet';   // its own page has room
  return el('li', {class: 'group', key: label, 'data-group': name},
    el('a', {class: 'title', href: groupAddress(name)}, drawName(name, '')),
    el('progress', {'aria-label': `${number(ended)} of ${number(total)} have ended`,
      value: isSet(far) ? far * total : ended, max: total}),
    parts.map(([status, count, word = status, tone = KINDS[status] ?? '']) => el('a', {class: `badge ${tone}`,
      key: word, href: groupAddress(name, status)}, `${number(count)} ${word}`)),
    el('span', {class: 'why'}, worded(listed(hold ?? group.waiting_for, isSet(far) && percent(100 * far),
      end && !hold && `about ${about(-secondsSince(end))} left`, !isOn && failures > 0 && group.failed_line))),
    el('span', {class: 'actions'}, group.failed_id
      && action('Retry failed', label, () => retry({group: name}), {class: kind}),
    isOn && pauseButton(Boolean(hold), label, 'service', {query: `?group=${encodeURIComponent(name)}`, kind}),
    isOn && action('Cancel', label, () => cancelGroup(group), {class: kind})));
}
