// ---- A job's page

const SHOWN = SHOW_ROWS;                        // {heading: {key of a job: [its line, the unit of what stands in it]}}
const UNITS = {clock, duration, size, percent, priority: (rank) => PRIORITIES[rank] ?? rank,
  text: (fact) => fact === true ? 'yes' : typeof fact === 'object' ? Object.values(fact).join(', ') : fact};
let jobPage = null;                             // {id, line, job, why, error, loadedAt} of the one that is shown

// What a job's row has from its output
const PRINTED = ['label', 'last_line', 'metric_line', 'fraction', 'estimated_end', 'progress_by'];

// Whether what has changed asks for the job that is shown.  The reason why one waits may lie anywhere.
function hasNewsOfJob({state_version: _, is_whole: isAll, readings, host, jobs = {}, ...others}) {
  const {id, job, loadedAt} = jobPage, row = jobs[id];
  if (isOver(job)) return false;
  if (isAll || !job || Date.now() - loadedAt > JOB_STALE_MS) return true;
  if (!isRunning(job)) return Object.keys({...jobs, ...others}).length > 0;
  if (!(id in jobs)) return false;
  if (!row || Object.keys(row).some((name) => !PRINTED.includes(name))) return true;
  Object.assign(job, row);
  return false;
}

async function loadJob() {
  const page = jobPage;
  if (!page || page.error) return;
  page.loadedAt = Date.now();
  try {
    const job = await ask('GET', pathOf(page.id));
    const why = job.status === 'pending' ? await ask('GET', `${pathOf(page.id)}/why`) : null;
    Object.assign(page, {job, why});
  } catch (error) {
    if (error.status === 0) return;             // follow() says that the connection is lost
    if (![403, 404].includes(error.status)) return complain(error);
    page.error = error;
  }
  if (jobPage !== page) return;
  setTitle();
  drawJobPage();
  loadUsage(page);
}

function drawJobPage() {
  const {id, job, error} = jobPage;
  const title = error?.message ?? ['Job ' + id, job?.name].filter(Boolean).join(': ');
  let result = job?.status;
  if (job?.stopping) result = 'stopping';
  else if (isOver(job) && job.status !== 'completed') result = `${job.status}: ${job.outcome ?? '-'}`;
  const back = isFiltered() ? '\u2190 Back to the list' : '\u2190 All jobs';
  show(byId('facts'), el('p', {}, el('a', {href: homeAddress}, back)),
    el('div', {class: 'head'}, el('h1', {tabindex: -1}, title), job && !error && [
      badge(job.status, result), job.is_held && badge('Paused', 'held'), isRunning(job) && drawProgress(job),
      drawTime(job), el('div', {class: 'actions'}, drawActions(job))]),
    error ? [muted(error.hint), ...listRuns(id)] : job && drawFacts(job));
  if (error) closeLog();
  else if (job?.attempt > 0 && (!log || log.isOver && isRunning(job))) openLog(id, whatToShow());
  if (log) describeLog();
}

function whatToShow() {                         // of a log: the line of the address, or the error, or the end
  const {line, job} = jobPage;
  jobPage.line = null;
  if (line) return linesAround(line);
  return job.status === 'failed' && job.cause_line ? {then: goToError} : {};
}

function listRuns(id) {                         // of a job that is forgotten, the picture of what ran still tells
  const lanes = night.data ? listLanes(night.data) : [];
  const told = lanes.flatMap((lane) => lane.bars.filter((run) => run.id === id).map((run) => nameRun(lane, run)));
  return told.length > 0 ? ['It was forgotten, with its log.', ...told].map((text) => el('p', {}, text)) : [];
}

function drawActions(job) {
  const {id} = job;
  if (isOver(job)) {
    return [button('Retry', () => retry({ids: [id]})), button('Change and retry', () => openForm(
      'retry', `Run job ${id} again`, 'Retry', job, (change, refuse) => retry({ids: [id]}, change, refuse)))];
  }
  const move = (position, words) => view?.is_owner
    && button(`Move ${words}`, () => edit(id, {position}, `was moved ${words}`));
  return [
    job.status === 'pending' && [holdButton(job), move(0, 'to the front'), move(-1, 'to the end')],
    button('Change', () => openForm(job.status, `Change job ${id}`, 'Change', job,
      (change, refuse) => edit(id, change, 'was changed', refuse))),
    button('Cancel', () => cancelJob(job), {disabled: Boolean(job.stopping)})];
}

function drawFacts(job) {
  const {id, user, why, idle_since: idle, unknown_since: unknown} = {...job, ...jobPage};
  const {remedy} = job;
  const list = (lines, kind) => lines.map((line) => el('li', {class: kind}, worded(line)));
  const attempts = job.attempts.map((attempt) => listed(`attempt ${attempt.attempt}: ${attempt.outcome ?? 'running'}`,
    where(attempt), duration(attempt.runtime_seconds ?? 0), attempt.cause_line));
  const facts = {...job, place: where(job), retries: job.retries || null};
  const linesOf = (rows) => {                   // what a heading has of this job
    const lines = [];
    for (const [name, [line, unit]] of Object.entries(rows)) {
      const text = isSet(facts[name]) ? (UNITS[unit] ?? UNITS.text)(facts[name]) : '';
      if (text !== '' && text !== false) lines.push(line.replace('{}', text));
    }
    return lines;
  };
  const details = Object.entries(SHOWN).map(([title, rows]) => [title, linesOf(rows)])
    .filter(([, lines]) => lines.length);
  const use = Object.values(view?.gpus ?? {}).filter((gpu) => gpu.job_ids.includes(id)).map(({place}) => {
    const {utilization: load, memory_used_mib: used} = view.readings[place] ?? {};
    return `GPU ${place}: ${[isSet(load) && percent(load), isSet(used) && size(used)].filter(Boolean).join(', ')}`;
  });
  const links = (words, ids) => ids.length > 0 && [` \u00b7 ${words} `, ids.flatMap((each) => [jobLink(each), ' '])];
  const places = job.started_at && use.length === 0 ? [where(job)] : use;
  return [
    el('p', {class: 'muted'}, listed(user, ...places,
      job.started_at && `started ${clock(job.started_at)}`,
      job.finished_at && `ended ${clock(job.finished_at)}`,
      job.estimated_end && `ends about ${clock(job.estimated_end)}`,
      job.timeout_seconds && `time limit ${duration(job.timeout_seconds)}`),
    job.group && [' \u00b7 group ', el('a', {href: groupAddress(job.group)}, job.group)],
    links('after', [...job.after, ...job.after_any]),
    [...job.after_group, ...job.after_any_group].map((group) =>
      [' \u00b7 after group ', el('a', {href: groupAddress(group)}, group)]),
    links('again as', [job.retried_as].filter(isSet))),
    banner('bad', unknown && `${job.node} has not been heard since ${clock(unknown)}: `
      + 'nothing is known of this job until it is back.'),
    banner('warn', idle && `Its GPUs have done nothing since ${clock(idle)}. `
      + `If it waits for an answer, on the machine: nexus attach ${id}`),
    banner('bad', job.cause_line),
    banner('warn', remedy && `What may help, on the machine: ${remedy}`),
    banner('bad', job.unrecorded && `${job.status}; ${job.unrecorded}`),
    banner('warn', job.notes.join('; ')),
    el('pre', {class: 'panel pad', key: 'command', 'aria-label': 'Command'}, commandOf(job)),
    why && section('why', 'Why it waits', '', el('ul', {class: 'panel pad'},
      list([why.why, ...why.facts]), list(why.verdicts, 'muted'))),
    attempts.length > (job.status === 'pending' ? 0 : 1)
      && section('attempts', 'Attempts', '', el('ul', {class: 'panel pad'}, list(attempts))),
    jobPage.usage?.gpus && drawUsage(jobPage.usage),
    el('details', {class: 'panel pad'}, el('summary', {}, 'Details'),
      el('div', {class: 'facts'}, details.map(([title, lines]) =>
        el('div', {key: title}, el('h3', {}, title), el('ul', {}, list(lines))))))];
}
