// ---- What each GPU did and what ran on it: a lane for each.  It is asked for while somebody looks at it: at once when
// they choose a time, a minute after something has begun or ended, else when there is a step more.

const RANGES = {'1h': ['hour', 3600, '1m', '5s', 300], '24h': ['24 hours', 86400, '10m', '1m', 840],
  '7d': ['7 days', 604800, '10m', '10m', 840]};        // its words, seconds, step, merge, least width
const LANE = matchMedia('(pointer: coarse)').matches ? 26 : 18;         // px: a finger needs more
const TICK_WIDTH = 64, LETTER = 6.4;            // px
const TICKS = [300, 900, 1800, 3600, 10800, 21600, 86400];      // seconds
const night = {range: '24h', data: null, seen: null, askedAt: 0, focus: null, width: 0, hasTable: false,
  isAtEnd: true, isChosen: false, isOpen: localStorage.getItem('nexus-night') !== 'closed'};

async function loadNight() {
  const [, seconds, step, within] = RANGES[night.range], {range} = night;
  const seen = JSON.stringify([view.counts, Object.values(view.gpus).map((gpu) => gpu.job_ids)]);
  const rest = Math.max(60, seen === night.seen ? seconds / 288 : 0) * 1000;
  if (!night.isOpen || document.hidden || Date.now() < night.askedAt + rest) return;
  Object.assign(night, {askedAt: Date.now(), seen});
  const slices = Object.values(view.gpus).some((gpu) => gpu.profile) ? ['memory_used_mib'] : [];
  const query = new URLSearchParams({since: range, step, merge: within, series: ['utilization', 'others', ...slices]});
  try {
    const data = await ask('GET', `gpus/history?${query}`);
    if (range !== night.range) return;
    night.data = {...data, range};
    const steps = data.gpus.flatMap(({others}) => others);
    if (!night.isChosen && range === '24h' && steps.filter(isSet).length < steps.length / 2) night.range = '1h';
    if (night.range !== range) night.askedAt = 0;               // little of a day is known yet
    draw();
  } catch (error) {
    if (![0, 401].includes(error.status)) complain(error);      // follow() says that the connection is lost
  }
}

function chooseRange(range) {
  Object.assign(night, {range, askedAt: 0, isAtEnd: true, isChosen: true});
  draw();
}

function drawNight() {
  if (!Object.keys(view.gpus).length) return null;
  loadNight();
  const {data, range} = night, [words] = RANGES[data?.range ?? range];         // the former, until the new one is there
  const told = ['failed', 'preempted', 'cancelled'].map((word) => data?.counts[word]
    && `${counted(data.counts[word], 'run')} ${word}`);
  const ontoggle = ({target}) => {
    if (target.open === night.isOpen) return;   // it has been drawn
    night.isOpen = target.open;
    if (target.open) localStorage.removeItem('nexus-night');
    else localStorage.setItem('nexus-night', 'closed');
    loadNight();
  };
  const facts = {id: 'night-open', open: night.isOpen, ontoggle};
  return el('section', {id: 'night', 'aria-label': 'What ran'}, el('details', facts,
    el('summary', {}, el('h2', {}, `Last ${words}`),
      muted(data && listed(`jobs had the GPUs for ${percent(100 * data.used)} of the recorded time`, ...told,
        data.used_by_others >= 0.005 && `others used them for ${percent(100 * data.used_by_others)}`))),
    el('div', {class: 'ranges', role: 'group', 'aria-label': 'Time shown'}, Object.keys(RANGES).map((each) =>
      button(each.replace(/\D/, ' $&'), () => chooseRange(each), {'aria-pressed': String(each === range)}))),
    data ? drawLanes(data) : el('p', {class: 'muted pad'}, 'Loading \u2026')));
}

function drawLanes(data) {
  const [, seconds, , , least] = RANGES[data.range], end = Date.parse(data.end) / 1000;
  const width = Math.max(night.width, least), at = (time) => width * (1 - (end - time) / seconds);
  const lanes = listLanes(data), height = lanes.at(-1).top + LANE, bars = lanes.flatMap((lane) => lane.bars);
  const isHere = bars.some((run) => run.key === night.focus);
  const links = lanes.map((lane) => layOut(lane.bars).map((place) =>
    drawRun(lane, place, at, isHere ? night.focus : bars.at(-1).key)));
  const title = `What ran on the GPUs in the last ${RANGES[data.range][0]}`;
  const onscroll = ({target}) => { night.isAtEnd = target.scrollLeft + target.clientWidth > target.scrollWidth - 24; };
  const drawLabel = ({gpu, top}, index) => svg('svg', {height: LANE, key: gpu.uuid,
    class: index && top - lanes[index - 1].top > LANE ? 'apart' : ''},
  svg('text', {x: 4, y: LANE / 2 + 4}, gpu.place),
  svg('title', {}, listed(gpu.place, gpu.name, gpu.is_gone && 'gone')));
  const words = ['completed', 'failed', 'cancelled', 'running', 'preempted'];
  return [
    width > night.width && night.width > 0
      && el('p', {class: 'small muted', key: 'scrolls'}, '\u2190 Scroll the picture for what was before'),
    el('div', {class: 'lanes panel'}, el('div', {class: 'names', 'aria-hidden': 'true'}, lanes.map(drawLabel)),
      el('div', {id: 'lanes', class: 'scroll', tabindex: bars.length ? null : 0, onscroll},
        svg('svg', {width, height: height + 20, role: 'group', 'aria-label': title, onkeydown: stepRuns},
          svg('g', {'aria-hidden': 'true'}, lanes.map((lane) => drawCurves(lane, data, at)),
            drawTicks(end, seconds, at, height)),
          links))),
    el('p', {class: 'legend small muted', 'aria-hidden': 'true'}, words.map((word) => el('span', {class: word}, word)),
      el('span', {class: 'others'}, 'others\u2019 use'), el('span', {class: 'load'}, 'load'),
      el('span', {class: 'unknown'}, 'not recorded')),
    drawTable(lanes)];
}

function listLanes({gpus, rows}) {              // {gpu, top, bars} of each, by machine
  const isElsewhere = ({place}) => place.includes(':');
  const sorted = gpus.sort((a, b) => isElsewhere(a) - isElsewhere(b) || a.node.localeCompare(b.node)
    || localPlace(a) - localPlace(b));
  let top = 0;
  return sorted.map((gpu, index) => {
    top += index > 0 && (LANE + (gpu.node === sorted[index - 1].node ? 0 : 6));
    const bars = rows.filter((run) => run.gpu_uuids.includes(gpu.uuid)).map((run) => ({...run,
      key: `${run.id} ${run.attempt} ${gpu.uuid}`, begin: Date.parse(run.started_at) / 1000,
      end: Date.parse(run.finished_at ?? night.data.end) / 1000}));
    return {gpu, top, bars};
  });
}

function layOut(bars) {                         // [run, its place among those of the same time, how many these are]
  const places = [];
  let together = [], until = 0;
  const close = () => {
    for (const [run, row] of together) places.push([run, row, 1 + Math.max(...together.map(([, each]) => each))]);
    together = [];
  };
  for (const run of bars) {
    if (run.begin >= until) close();
    const taken = together.filter(([other]) => other.end > run.begin).map(([, row]) => row);
    together.push([run, [...taken.keys(), taken.length].find((row) => !taken.includes(row))]);
    until = Math.max(until, run.end);
  }
  close();
  return places;
}

const countRuns = (counts) => Object.entries(counts).map(([word, count]) => `${number(count)} ${word}`).join(', ');
const statusOf = ({counts, status, outcome}) => counts ? countRuns(counts)
  : listed(status, status !== 'completed' && outcome !== status && outcome);

function nameRun({gpu}, run) {
  const {id, name, user, counts, begin, end} = run;
  return listed(counts ? `Jobs such as ${id}` : `Job ${id} ${name ?? `(${user}'s)`}`, `GPU ${gpu.place}`, statusOf(run),
    `${shortClock(begin)} to ${run.finished_at ? shortClock(end) : 'now'}`, duration(end - begin));
}

function drawRun(lane, [run, row, rows], at, focus) {
  const {key, id, counts, name} = run, title = nameRun(lane, run), x = Math.max(0, at(run.begin));
  const width = Math.max(2, at(run.end) - x - 0.5), height = (LANE - 3) / rows, y = lane.top + 1.5 + row * height;
  const total = counts && Object.values(counts).reduce((sum, count) => sum + count), failed = counts?.failed ?? 0;
  const status = CAUSES[run.status]?.requeues ? 'preempted' : run.status;       // what waits again looks alike
  const mark = status === 'running' ? '' : MARKS[status] ?? '';
  const words = counts ? `${number(total)} jobs` : `${mark} ${name ?? id}`.trim();
  const room = Math.floor((width - 6) / LETTER);                // letters
  return svg('a', {key, class: `run ${failed && failed < total ? 'completed' : status}`, href: addressOf(id),
    'aria-label': title, tabindex: key === focus ? 0 : -1, 'data-key': key, 'data-lane': lane.top},
  svg('title', {}, title), svg('rect', {x, y, width, height, rx: Math.min(2, width / 3)}),
  status === 'preempted' && svg('line', {x1: x, x2: x + width, y1: y + height / 2,
    y2: y + height / 2, 'stroke-width': height}),                       // of dashes: hatched
  failed > 0 && failed < total && svg('rect', {class: 'part', x, y: y + height - 3, width, height: 3}),
  room > 2 && height > 11 && svg('text', {x: x + 4, y: y + height / 2 + 4},
    words.length > room ? `${words.slice(0, room - 1)}\u2026` : words));
}

// Of all bars one is in the order of Tab; the arrows lead to the others.
function stepRuns(event) {
  const step = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1],
    Home: [-Infinity, 0], End: [Infinity, 0]}[event.key];
  const from = document.activeElement.closest('.run');
  if (!step || !from) return;
  event.preventDefault();
  const left = (node) => Number(node.querySelector('rect').getAttribute('x'));
  const lane = (node) => Number(node.dataset.lane);
  const all = [...event.currentTarget.querySelectorAll('.run')].sort((a, b) => left(a) - left(b));
  const [alongside, across] = step;
  let to;
  if (across) {
    const beyond = all.filter((node) => (lane(node) - lane(from)) * across > 0);
    const distance = (node) => 1e6 * Math.abs(lane(node) - lane(from)) + Math.abs(left(node) - left(from));
    to = beyond.reduce((best, node) => best && distance(best) <= distance(node) ? best : node, null);
  } else {
    const own = all.filter((node) => lane(node) === lane(from));
    to = own[Math.max(0, Math.min(own.length - 1, own.indexOf(from) + alongside))];
  }
  if (!to) return;
  night.focus = to.dataset.key;
  from.setAttribute('tabindex', -1);
  to.setAttribute('tabindex', 0);
  to.focus();
}

const shortClock = (seconds) => new Date(1000 * seconds).toLocaleString([], night.data.range === '7d'
  ? {weekday: 'short', hour: '2-digit', minute: '2-digit'} : {hour: '2-digit', minute: '2-digit'});

function drawTicks(end, seconds, at, height) {  // at whole hours, or days, of the reader's clock
  const step = TICKS.find((each) => at(end) - at(end - each) >= TICK_WIDTH) ?? TICKS.at(-1);
  const zone = new Date(1000 * end).getTimezoneOffset() * 60, ticks = [];
  for (let time = Math.ceil((end - seconds - zone) / step) * step + zone; time <= end; time += step) {
    const date = new Date(1000 * time), isDay = !date.getHours() && !date.getMinutes();
    const word = isDay ? date.toLocaleDateString([], {month: 'short', day: 'numeric'})
      : date.toLocaleTimeString([], {hour: '2-digit', minute: '2-digit'});
    const x = at(time), anchor = x > at(end) - 20 ? 'end' : x < 20 ? 'start' : 'middle';
    ticks.push(svg('g', {class: 'tick'}, svg('line', {x1: x, x2: x, y2: height}),
      svg('text', {x, y: height + 14, 'text-anchor': anchor}, word)));
  }
  return ticks;
}

// Behind the bars: where there are readings, the load, and other people's use.
function drawCurves({gpu, top}, data, at) {
  const [begin, end] = [data.begin, data.end].map((stamp) => Date.parse(stamp) / 1000), step = data.step_seconds;
  const total = view.gpus[gpu.place]?.memory_total_mib, bottom = top + LANE - 1;
  const shares = gpu.utilization.some(isSet) ? gpu.utilization.map((load) => load / 100)
    : (gpu.memory_used_mib ?? []).map((memory) => total ? memory / total : 0);
  const trace = (heights) => heights.map((share, index) => {
    const [x, next] = [index, index + 1].map((each) => Math.max(0, at(Math.min(end, begin + each * step))).toFixed(1));
    return share > 0 && next > 0 ? `M${x} ${bottom}V${(bottom - share * (LANE - 2)).toFixed(1)}H${next}V${bottom}` : '';
  }).join('');
  const path = (kind, heights) => svg('path', {class: kind, d: trace(heights)});
  return svg('g', {key: gpu.uuid}, path('known', gpu.others.map(isSet)),
    path('others', gpu.others.map((share) => share > 0)), path('load', shares));
}

function drawTable(lanes) {                     // the same to be read
  const ontoggle = ({target}) => { night.hasTable = target.open; draw(); };
  const rows = lanes.flatMap(({gpu, bars}) => bars.map((run) => ({gpu, run})));
  const columns = chooseColumns(RUN_COLUMNS, rows), heading = el('tr', {}, drawHeadings('th', columns));
  const drawRow = (row) => el('tr', {key: row.run.key}, drawCells('td', columns, row));
  const users = lanes.map(({gpu}) => [gpu.place, gpu.others.reduce((sum, share) => sum + (share ?? 0) / 100, 0)])
    .filter(([, steps]) => steps > 0)
    .map(([place, steps]) => `GPU ${place}: used by others for ${about(steps * night.data.step_seconds)}`);
  return el('details', {class: 'small', id: 'night-table', ontoggle}, el('summary', {}, 'As a table'),
    night.hasTable && [el('p', {}, listed(...users)),
      el('div', {class: 'scroll', tabindex: 0, role: 'region', 'aria-label': 'What ran, as a table'},
        el('table', {}, el('thead', {}, heading), el('tbody', {}, rows.map(drawRow))))]);
}

const nightSize = new ResizeObserver(([{contentRect: {width}}]) => {
  if (width && Math.abs(width - night.width) > 1) {
    night.width = Math.floor(width);
    draw();
  }
});

function settleNight() {                        // the newest is in view, until its reader scrolls back
  const box = byId('lanes');
  if (!box) return;
  nightSize.observe(box);
  if (night.isAtEnd) box.scrollLeft = box.scrollWidth;
}
