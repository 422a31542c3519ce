// ---- The overview: what stands on it, and the bar above it

function setTitle() {                           // tabs behind others tell of failures, too
  const {name, status} = jobPage?.job ?? view?.jobs[jobPage?.id] ?? {}, failures = view?.found.failures ?? 0;
  const counts = view && `${number(view.counts.running)} running, ${number(view.counts.pending)} waiting`;
  document.title = listed(failures > 0 && `\u2717 ${failures}`,
    jobPage ? `${MARKS[status] ?? ''} ${name ?? jobPage.id}`.trim() : counts, 'nexus');
}

function draw() {
  setTitle();
  if (view) drawHeader();
  if (jobPage) return drawJobPage();
  if (!view) return;
  measureNames();
  const hasJobs = Object.values(view.counts).some(Boolean), checks = view.bad_checks.join(', ');
  const state = [el('div', {id: 'banners'},
    banner('warn', view.is_paused && 'The queue is paused: running jobs go on, nothing new starts.'),
    banner('warn', checks && `Not well: ${checks}. What to do, on the machine: nexus health`),
    banner('bad', view.gpu_trouble), banner('bad', view.slurm?.trouble), view.hints.map((text) => banner('busy', text)),
    banner('busy', !hasJobs
      && 'There is no job yet. Add one with the button above, or on the machine: nexus add "python train.py"')),
  !isFiltered() && drawFailures(), drawGpus(), drawNight()];
  const lists = (hasJobs || isFiltered()) && drawLists();       // what was looked for comes first
  show(byId('overview'), el('h1', {class: 'unseen'}, 'nexus: GPUs and jobs'),
    isFiltered() ? [lists, state] : [state, lists, drawDiskUse()]);
  fitNames();
  settleNight();
}

function drawDiskUse() {
  const {log_bytes: bytes, largest, history_bytes: history} = view.disk_use ?? {};
  const of = (count) => size(count / 2 ** 20);
  return bytes >= 2 ** 20 && el('p', {id: 'disk-use', class: 'muted'}, `Logs: ${of(bytes)}`,
    largest.slice(0, 3).map((row, index) =>
      [index ? ', ' : '; the largest: ', jobLink(row.id), ` ${of(row.log_bytes)}`]),
    `; history: ${of(history)}. On the machine: nexus clear --older 30d --dry-run`);
}

function drawHeader() {
  const {counts, host} = view, {failures} = view.found;
  const count = (status, word, facts = {}, many = counts[status]) => el('a', {href: `#/?status=${status}`, ...facts},
    el('b', {}, number(many)), ` ${word}`);
  show(byId('host'), listed(host.name, isSet(host.cpu_percent) && `CPU ${percent(host.cpu_percent)}`,
    isSet(host.memory_used_gb) && `${Math.round(host.memory_used_gb)} of ${Math.round(host.memory_total_gb)} GB`));
  show(byId('version'), `nexus ${view.version}, as ${view.user}`);
  show(byId('counts'), count('running', 'running'), count('pending', 'waiting'),
    count('failed', 'failed', {class: failures && 'red', title: 'neither retried nor dismissed'}, failures));
  show(byId('pause'), pauseButton(view.is_paused, 'the queue', 'service', {noun: ' queue'}));
  const dot = failures ? '<circle cx="12" cy="4" r="4" fill="#e5322d"/>' : '';
  const icon = `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><rect width="16" height="16" rx="4"
    fill="#2159c9"/><path d="M4.5 12V4l7 8V4" fill="none" stroke="#fff" stroke-width="2"/>${dot}</svg>`;
  byId('icon').href = `data:image/svg+xml,${encodeURIComponent(icon)}`;
}
