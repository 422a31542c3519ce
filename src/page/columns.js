// ---- The columns of the page: what the rows of GPUs, of jobs and of what ran have, from left to right

// A column is a row here.  isShown: whether a row needs it; a table with headings has it where one of its rows does.
// draw: makes what is in a cell; in a job's row, which has no headings, the cell itself, also from what this row alone
// tells: {note, reason, actions}.  kind: the class of cells and heading, with a width in page.css.  title: of a cell.
// The columns of a group's results are in src/views/results.py.

const GPU_COLUMNS = [
  {heading: 'GPU', kind: 'place', title: describeGpu, draw: (gpu) => [el('b', {}, localPlace(gpu)),
    gpu.profile && el('div', {class: 'muted quiet small'}, gpu.profile)]},
  {heading: 'Load', kind: 'gauge load', title: describeGpu, draw: (gpu) =>
    drawGauge(gpu, 'load', readingsOf(gpu).utilization, 100, percent)},
  {heading: 'Memory', kind: 'gauge memory', title: describeGpu, draw: (gpu) =>
    drawGauge(gpu, 'memory', readingsOf(gpu).memory_used_mib, gpu.memory_total_mib, size)},
  {heading: 'Job', kind: 'grow', draw: drawUses},
  {kind: 'later', draw: (gpu) => !gpu.is_paused && pauseGpuButton(gpu)}
];

const JOB_COLUMNS = [
  {draw: drawJobLink},
  {isShown: (job) => job.is_held, draw: () => badge('Paused', 'held')},
  {isShown: isOver, draw: ({status, outcome}) =>
    badge(status, outcome && status !== 'completed' ? outcome : `${MARKS[status]} ${status}`)},
  {isShown: (job) => job.user !== view.user, draw: (job) => muted(job.user)},
  {draw: (job, {note}) => note},
  {isShown: (job) => job.retried_as, draw: ({retried_as: id}) => el('span', {class: 'muted'}, 'run again as ',
    jobLink(id))},
  {isShown: (job) => job.is_dismissed && !job.retried_as, draw: () => muted('dismissed')},
  {isShown: (job) => job.preemptions > 0, draw: (job) =>
    muted(`${job.preemptions} \u00d7 preempted, ${about(job.preempted_seconds)} lost`)},
  {isShown: (job) => isRunning(job) && job.gpus % 1 > 0, draw: (job) =>
    el('span', {class: 'quiet muted'}, `${job.gpus} GPU`)},
  {isShown: (job) => isRunning(job) && job.idle_since, draw: (job) => sinceBadge('idle', job.idle_since)},
  {isShown: (job) => isRunning(job) && job.unknown_since, draw: (job) => sinceBadge('unknown', job.unknown_since)},
  {isShown: (job) => isRunning(job) && job.stopping, draw: () => badge('cancelled', 'stopping')},
  {isShown: (job) => isRunning(job) && job.processes_left > 0, draw: () => badge('Paused', 'command ended')},
  {isShown: isRunning, draw: drawProgress},
  {isShown: isRunning, draw: ({last_line: line}) => el('span', {class: 'line', title: line},
    el('span', {class: 'clip'}, line))},
  {isShown: (job) => job.unrecorded, draw: (job) => el('span', {class: 'why'}, `${job.status}; ${job.unrecorded}`)},
  {isShown: ({status}) => status === 'pending', draw: ({only_node: node, estimated_start: start, ...job}, own) =>
    el('span', {class: 'why'}, worded(listed(hasNodes() && node && `on ${node}`, own.reason ?? job.waiting_for,
      start && `starts in about ${about(-secondsSince(start))}`)))},
  {isShown: isOver, draw: ({cause_line: line}) => el('span', {class: 'cause small command clip', title: line}, line)},
  {draw: drawTime},
  {draw: (job, {actions}) => actions && el('span', {class: 'actions'}, actions)}
];

const RUN_COLUMNS = [                           // of {gpu, run}: what ran on a GPU
  {heading: 'GPU', draw: ({gpu}) => gpu.place},
  {heading: 'Job', draw: ({run}) => el('a', {href: addressOf(run.id)}, listed(run.id, run.name))},
  {heading: 'Status', draw: ({run}) => statusOf(run)},
  {heading: 'From', draw: ({run}) => shortClock(run.begin)},
  {heading: 'To', draw: ({run}) => run.finished_at ? shortClock(run.end) : 'now'},
  {heading: 'Runtime', draw: ({run}) => duration(run.end - run.begin)}
];

const chooseColumns = (columns, rows) => columns.filter(({isShown}) => !isShown || rows.some((row) => isShown(row)));
const drawHeadings = (tag, columns) => columns.map(({heading, kind}) => el(tag, {class: kind}, heading));
const drawCells = (tag, columns, row) => columns.map(({kind, title, draw: drawContent}) =>
  el(tag, {class: kind, title: title?.(row)}, drawContent(row)));
const drawLine = (columns, row, own = {}) =>    // a row without headings
  chooseColumns(columns, [row]).map(({draw: drawCell}) => drawCell(row, own));

const readingsOf = (gpu) => view.readings[gpu.place] ?? {};
const pauseGpuButton = ({place, is_paused: isPaused}) => pauseButton(isPaused, `GPU ${place}`,
  `gpus/${encodeURIComponent(place)}`, {noun: ' GPU', kind: 'quiet link'});

function describeGpu(gpu) {
  const {utilization_mean: mean, memory_used_mib: used, temperature, power_watts: watts} = readingsOf(gpu);
  return listed(`GPU ${gpu.place}`, gpu.name, isSet(mean) && `load in the last hour ${percent(mean)}`,
    isSet(used) && `${size(used)} of ${size(gpu.memory_total_mib)}`,
    isSet(temperature) && `${Math.round(temperature)} \u00b0C`, isSet(watts) && `${Math.round(watts)} W`);
}

const drawGauge = ({place}, word, value, max, words) => !isSet(value) ? muted('\u2013')
  : [el('progress', {'aria-label': `GPU ${place} ${word}`, value, max}), el('span', {}, words(value))];

function drawUses(gpu) {                        // its jobs, or why it has none
  const jobs = jobsOf(gpu), unavailable = jobs.length > 0 || gpu.is_paused ? null : gpu.unavailable;
  const isKept = unavailable && gpu.kept_for, word = isKept && unavailable.replace(/^is k/, 'K');
  const note = gpu.fault ?? gpu.used_by ?? (isKept ? null : unavailable);
  return [
    jobs.map((job) => el('div', {class: 'use', key: job.id, 'data-job': job.id}, drawLine(JOB_COLUMNS, job,
      {group: job.group}))),
    (gpu.state !== 'Busy' || note) && el('div', {class: 'use', key: 'state'}, badge(gpu.state, word || gpu.state),
      gpu.is_paused && pauseGpuButton(gpu), note && el('span', {class: gpu.fault ? 'red' : 'muted'}, worded(note)))];
}

function drawJobLink(job, {at = '', group}) {   // at: of its page; group: it is not told elsewhere
  const name = nameOf(job), {label} = job, tip = listed(label && job.name, commandOf(job));
  return el('a', {class: 'job', href: addressOf(job.id) + at, title: tip, 'aria-label': `Job ${job.id} ${name}`},
    el('span', {class: 'id'}, job.id), label ? drawRowLabel(label, group)
      : drawName(name, job.name ? 'title' : 'command'));
}

const sinceBadge = (word, stamp) => badge('Paused', `${word} for ${about(secondsSince(stamp))}`);

// How far a running job is, and how long it still takes: "41 % \u00b7 12m left".
function drawProgress({fraction, estimated_end: end, progress_by: by}) {
  if (!isSet(fraction)) return null;
  return [el('progress', {'aria-label': 'Progress', value: fraction, max: 1}),
    el('span', {class: 'far'}, by !== 'output' && 'about ',
      listed(percent(100 * fraction), end && `${about(-secondsSince(end))} left`))];
}

function drawTime(job) {                        // how long it runs, or ran, and since when it is over
  const {started_at: start, finished_at: end, runtime_seconds: run} = job;
  if (!isOver(job)) return el('span', {class: 'time', 'data-since': start}, start && duration(secondsSince(start)));
  return el('time', {class: 'time', datetime: end, title: listed(clock(end), start && where(job))},
    isSet(run) && el('span', {class: 'quiet'}, `${duration(run)} \u00b7 `), ago(end));
}
