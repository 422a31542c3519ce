// ---- The log of a job: opened, read on, shown

// The service holds the question for more of a log until there is more.  A browser has six connections to a service,
// for all its tabs: one tab that is seen may have its question held, the others ask again and again.

const TAB = `${Math.random()}`;

function mayBeHeld() {
  const [tab, until] = (localStorage.getItem('nexus-log') ?? '').split(' ');
  if (tab && tab !== TAB && Number(until) > Date.now()) return false;
  localStorage.setItem('nexus-log', `${TAB} ${Date.now() + LOG_SILENCE_MS}`);
  return true;
}

function endHolding() {
  log?.asking.abort();
  if (localStorage.getItem('nexus-log')?.startsWith(TAB)) localStorage.removeItem('nexus-log');
}

document.addEventListener('visibilitychange', () => document.hidden && endHolding());
addEventListener('pagehide', endHolding);

const box = byId('lines'), newer = byId('newer');               // `newer` is seen when the end is not
const NDJSON = {Accept: 'application/x-ndjson'};
let log = null;                                 // the one that is shown, as it was opened
let shownLine = null;                           // the number of the line that was gone to
const isWhole = ({begin} = log) => !/[1-9]/.test(begin ?? '');
const canLoadEarlier = () => log?.isShown && !isWhole() && !log.isSeeking;

function closeLog() {
  endHolding();
  endSearch();
  log = shownLine = null;
  box.replaceChildren();
  newer.hidden = byId('log').hidden = true;
}

// Opens a log at its end, with `tail` lines, or LOG_TAIL of it from a line on; `then` is called when they are shown.
async function openLog(id, {tail = LOG_TAIL, line, then} = {}) {
  endHolding();
  const begin = line ? {line: Math.max(1, line), lines: LOG_TAIL, numbers: true}
    : {tail, numbers: byId('numbers').checked};
  const mine = log = {id, tail: line ? null : tail, asked: begin, begin: null, first: null, count: 0, attempt: 1,
    partials: [], problem: 'opening', asking: new AbortController(),
    sources: {stdout: new LogSource(null), stderr: new LogSource('err')}};
  byId('log').hidden = false;
  byId('raw').hidden = Boolean(getToken());     // a link carries no token
  byId('raw').href = byId('download').href = `${pathOf(id)}/logs?offset=0`;
  byId('download').download = `nexus-${id}.log`;
  while (log === mine && !mine.isOver) {
    const isFinal = isOver(jobPage.job);        // then all that it has printed comes now
    let lines = [], error = null;
    mine.asking = new AbortController();
    try {
      lines = await readLog(mine, mine.begin && !isFinal && mayBeHeld() ? LOG_WAIT_S : 0);
    } catch (failed) {
      error = mine.asking.signal.aborted ? null : failed;
    }
    if (log !== mine) return;
    const isAll = isFinal && !mine.isPart && !mine.asking.signal.aborted;
    mine.isOver = error ? error.status >= 400 && error.status < 500 : isAll;
    mine.problem = error && (error.status ? error.message : 'the connection is lost');
    if (!error) drawLog(lines);
    describeLog();
    if (mine.isShown) {
      then?.();
      then = null;
    }
    if (mine.isPart && !error) await new Promise((resolve) => { mine.goOn = resolve; });
    else do await sleep(LOG_PAUSE_MS); while (document.hidden);
  }
}

async function readLog(mine, wait) {            // returns the lines that are new
  const sources = Object.values(mine.sources), offsets = sources.map(({offset}) => offset).join();
  const query = !mine.begin ? mine.asked : {offset: offsets, ...mine.isPart ? {lines: LOG_TAIL} : {wait}};
  const {answer, content} = await request('GET', `${pathOf(mine.id)}/logs?${new URLSearchParams(query)}`,
    {headers: NDJSON, signal: mine.asking.signal, timeout: wait ? LOG_SILENCE_MS : ANSWER_MS});
  const starts = answer.headers.get('Log-Offset'), lines = [];
  mine.begin ??= starts;
  sources.forEach((source, index) => { source.offset = Number(starts.split(',')[index]); });
  let count = 0;
  for (const entry of content.split('\n').filter(Boolean).map((line) => JSON.parse(line))) {
    const {attempt, started_at: begun, has_earlier: hasEarlier, stream, end, text, line} = entry;
    if (hasEarlier && attempt !== mine.attempt) lines.push([[[`attempt ${attempt}, ${clock(begun)}`, '']], 'attempt']);
    mine.attempt = attempt;
    mine.first ??= line;
    mine.at = entry.at && timeOfDay(entry.at);
    mine.sources[stream].offset = end;
    const fresh = mine.sources[stream].feed(text);
    count += fresh.length;
    lines.push(...fresh.map((each) => [...each, mine.at]));
  }
  if (isWhole(mine)) mine.first = 1;
  mine.count += count;
  mine.isPart = isSet(query.lines) && count >= query.lines;
  return lines;
}

async function askLog(id, query, options) {     // as request(); waits while others search
  for (;;) {
    try {
      return await request('GET', `${pathOf(id)}/logs?${new URLSearchParams(query)}`,
        {headers: NDJSON, timeout: TRIAL_MS, ...options});
    } catch (error) {
      if (error.status !== 503) throw error;
      await sleep(1000);
    }
  }
}

function timeOfDay(stamp) {                     // 11-28 10:34:54
  const at = new Date(stamp), pad = (part) => `${part}`.padStart(2, '0');
  return `${pad(at.getMonth() + 1)}-${pad(at.getDate())} `
    + [at.getHours(), at.getMinutes(), at.getSeconds()].map(pad).join(':');
}

function drawLog(lines) {                       // those that are new; all when it was opened
  const below = box.scrollHeight - box.scrollTop;
  if (!log.isShown) box.replaceChildren();
  for (const node of log.partials) node.remove();
  log.partials = Object.values(log.sources).filter(({raw}) => raw)
    .map((source) => lineNode(...source.render(source.raw)[0], log.at));
  box.append(...lines.slice(-LOG_MOST).map((line) => lineNode(...line)), ...log.partials);
  while (box.children.length > LOG_MOST) box.firstChild.remove();
  numberLines();
  markLines();
  if (newer.hidden && !log.isPart) box.scrollTop = box.scrollHeight;
  else if (!log.isShown) box.scrollTop = box.scrollHeight - below;              // the lines in view stay in view
  log.isShown = true;
  newer.hidden = isAtEnd();
  show(newer, log.isPart || isOver(jobPage.job) ? '\u2193 To the end' : '\u2193 New lines');
}

const isAtEnd = () => !log?.isPart && box.scrollHeight - box.scrollTop - box.clientHeight < 24;

function describeLog() {
  const {status, cause_line: line} = jobPage.job ?? {}, count = box.children.length;
  let state = log.isOver ? 'complete' : 'live';
  if (status === 'pending') state = 'the next attempt has not started';
  const end = log.first + log.count - 1, part = log.isPart && `lines ${number(firstShown())} to ${number(end)}`;
  show(byId('log-state'), listed(log.problem || part || state, !part && counted(count, 'line'),
    !isWhole() && 'scroll up for earlier ones'));
  byId('to-error').hidden = !FINAL.includes(status) || !line || jobPage.hasNoError;
  byId('again').hidden = !search?.isDone || isOver(jobPage.job);
}

async function loadEarlier() {
  if (log.tail < LOG_MOST && log.tail) return openLog(log.id, {tail: LOG_MOST});
  const mine = log;
  mine.isSeeking = true;
  const isKnown = await findFirst().finally(() => { mine.isSeeking = false; });
  if (!isKnown) return;
  const line = firstShown(), top = () => bringIntoView(findLine(line), false);
  openLog(log.id, {line: line - LOG_TAIL / 2, then: top});
}

function keepInView(change) {                   // the line that was gone to, or else the first one that is seen
  const {top, bottom} = box.getBoundingClientRect(), placeOf = (node) => node.getBoundingClientRect().top;
  const isSeen = (node) => node && placeOf(node) >= top && placeOf(node) < bottom;
  const node = [box.querySelector('.marked'), ...box.children].find(isSeen), place = node && placeOf(node);
  change();
  if (newer.hidden) box.scrollTop = box.scrollHeight;
  else if (node) box.scrollTop += placeOf(node) - place;
}

box.onscroll = () => {
  if (!log) return;
  newer.hidden = isAtEnd();
  if (box.scrollTop < 40 && !newer.hidden && canLoadEarlier()) loadEarlier();
  if (log.isPart && box.scrollHeight - box.scrollTop - box.clientHeight < 40) log.goOn?.();
};

newer.onclick = () => {
  if (log.isPart) openLog(log.id, {then: () => { box.scrollTop = box.scrollHeight; }});
  else box.scrollTop = box.scrollHeight;
};

byId('to-options').onclick = ({target}) => {
  target.setAttribute('aria-expanded', target.getAttribute('aria-expanded') === 'false');
};
byId('wrap').onchange = ({target}) => keepInView(() => box.classList.toggle('unwrapped', !target.checked));
byId('times').onchange = ({target}) => keepInView(() => box.classList.toggle('timed', target.checked));

byId('download').onclick = (event) => {
  if (!getToken()) return;                      // the link does it
  event.preventDefault();
  const {href, download: name} = byId('download');
  return download(href, name);
};
