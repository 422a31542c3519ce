// ---- The lines of a log: their numbers, and the way to one of them.  They have numbers where that of the first one is
// known.  The service counts when it is asked to: it reads for that.

const listLines = () => [...box.children].filter((node) => !node.classList.contains('attempt'));
const firstShown = () => log.first + log.count - listLines().length + log.partials.length;
const findLine = (line) => isSet(log.first) ? listLines()[line - firstShown()] : null;

async function findFirst() {                    // whether the number of the first line is known now
  const mine = log;
  if (!isSet(mine.first) && mine.begin) {
    const {content} = await askLog(mine.id, {offset: mine.begin, lines: 1, numbers: true});
    if (content) mine.first = JSON.parse(content.split('\n')[0]).line;
  }
  return log === mine && isSet(mine.first);
}

function numberLines() {
  const isOn = byId('numbers').checked && isSet(log.first);
  box.classList.toggle('numbered', isOn);
  if (!isOn) return box.querySelectorAll('.number').forEach((node) => node.remove());
  const first = firstShown();
  listLines().forEach((node, index) => {
    if (node.firstChild?.className === 'number') return;
    const href = `${addressOf(log.id)}?line=${first + index}`;
    node.prepend(el('a', {class: 'number', tabindex: -1, href}, `${first + index}`));
  });
}

function markLines() {                          // what a search has found, and the line that was gone to
  if (!isSet(log?.first)) return;
  for (const node of box.querySelectorAll('.found, .marked')) node.classList.remove('found', 'marked');
  if (!search && !shownLine) return;
  const nodes = listLines(), first = firstShown();
  nodes[shownLine - first]?.classList.add('marked');
  const found = (search?.found ?? []).map((line) => nodes[line - first]).filter(Boolean);
  for (const node of found) node.classList.add('found');
  markWords(found.slice(0, LOG_TAIL));
}

function bringIntoView(node, isCentred = true) {                // within the log
  const {top, height} = node.getBoundingClientRect(), below = isCentred ? (box.clientHeight - height) / 2 : 0;
  box.scrollTop += top - box.getBoundingClientRect().top - below;
  newer.hidden = isAtEnd();
}

function showLine(line) {                       // among those that are loaded; whether it is
  const node = findLine(line);
  shownLine = line;
  markLines();
  if (node) bringIntoView(node);
  return Boolean(node);
}

async function goToLine(line) {                 // wherever it is; the address leads there then
  const {id} = log;
  shownLine = line;
  const isKnown = await findFirst();            // not of a log that is being opened
  if (log?.id !== id || shownLine !== line) return;             // one has gone on meanwhile
  history.replaceState(null, '', `${addressOf(id)}?line=${line}`);
  if (!isKnown || !showLine(line)) openLog(id, linesAround(line));
  byId('log').scrollIntoView({block: 'nearest'});
}

const linesAround = (line) => ({line: line - LOG_TAIL / 2, then: () => {
  if (showLine(line)) return byId('log').scrollIntoView({block: 'nearest'});
  tell(`This log has no line ${number(line)}.`);
  openLog(log.id);
}});

// To the line that says why the job failed.  Where it is not loaded, the service looks for it in what was printed last.
async function goToError(event) {               // by the button, or by a failure's link to its log: all of it is seen
  const isAsked = event || jobPage.isAtError;
  const mine = log, text = jobPage.job.cause_line.split('\u2026')[0].slice(0, 1000);
  const nodes = listLines(), index = nodes.findLastIndex((node) => node.textContent.includes(text));
  if (index >= 0) {
    shownLine = isSet(log.first) ? firstShown() + index : null;
    markLines();
    nodes[index].classList.add('marked');
    bringIntoView(nodes[index]);
    return isAsked && byId('log').scrollIntoView({block: 'nearest'});
  }
  const asked = {grep: text, numbers: true, offset: -SEARCHED_BYTES / 2};      // of each of the two streams
  const {content} = isWhole() ? {content: ''} : await askLog(mine.id, asked);
  if (log !== mine) return;
  const last = content.split('\n').filter(Boolean).map((line) => JSON.parse(line)).at(-1);
  jobPage.hasNoError = !last;
  describeLog();
  if (last) openLog(log.id, linesAround(last.line + countLines(last.text) - 1));
}

const countLines = (text) => text.split('\n').length - 1;

box.onclick = async (event) => {
  const line = event.target.closest('.number')?.textContent;
  if (!line || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  await goToLine(Number(line));
  const isCopied = await navigator.clipboard?.writeText(location.href).then(() => true, () => false);
  tell(isCopied ? `The address of line ${line} was copied.` : `The address of this page leads to line ${line} now.`);
};

byId('to-error').onclick = goToError;

byId('numbers').onchange = async ({target}) => {
  if (log && (!target.checked || await findFirst())) keepInView(numberLines);
};
