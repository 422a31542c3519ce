// ---- Numbers, times and sizes as people read them; addresses of jobs

function duration(seconds, most = 2) {          // 2h 15m: the largest units
  const left = Math.max(0, Math.floor(seconds));
  const parts = [[left / 86400, 'd'], [left / 3600 % 24, 'h'], [left / 60 % 60, 'm'], [left % 60, 's']]
    .map(([count, unit]) => count >= 1 && Math.floor(count) + unit);
  const first = parts.findIndex(Boolean);
  return parts.slice(first, first + most).filter(Boolean).join(' ') || '0s';
}

const isSet = (fact) => fact !== null && fact !== undefined;
const number = (count) => count.toLocaleString('en-US');
const counted = (count, word) => `${number(count)} ${word}${count === 1 ? '' : 's'}`;
const sentences = ({message, hint}) => [message, hint].filter(Boolean).join('. ');
const listed = (...parts) => parts.filter(Boolean).join(' \u00b7 ');
const percent = (share) => `${Math.round(share)} %`;
const size = (mib) => mib >= 1024 ? `${(mib / 1024).toFixed(1)} GB` : `${Math.round(mib)} MB`;
const secondsSince = (stamp) => (Date.now() + clockOffset - Date.parse(stamp)) / 1000;        // on the service's clock
const about = (seconds) => duration(Math.max(60, seconds), 1);
const ago = (stamp) => secondsSince(stamp) < 60 ? 'just now' : `${about(secondsSince(stamp))} ago`;
const clock = (stamp) => new Date(stamp).toLocaleString([],
  {month: 'short', day: 'numeric', hour: '2-digit', minute: '2-digit', second: '2-digit'});
const gpuList = (job) => job.gpu_places?.length ? `GPU ${job.gpu_places.join(', ')}` : !job.gpus && 'CPU';
const where = (job) => job.started_at ? listed(hasNodes() && job.node, gpuList(job)) : '';
const sleep = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));
const hasNodes = () => Object.keys(view?.nodes ?? {}).length > 0;
const isRunning = (job) => job?.status === 'running';
const isOver = (job) => FINAL.includes(job?.status);
const commandOf = (job) => job.command ?? `(${job.user}'s)`;     // a token of another user gets no command
const pathOf = (id) => `jobs/${encodeURIComponent(id)}`;
const addressOf = (id) => `#/${pathOf(id)}`;
const IDS = /((?:\b(?:after|before|for) jobs? |\bgroup \S+: )[A-HJ-NP-Za-km-z]{3,4}\b(?:, [A-HJ-NP-Za-km-z]{3,4}\b)*)/;
// What the service says of a reason, for a page that has buttons: Resume for its command, and the ids are links.
function worded(text) {
  return text.replace(/ \(nexus resume[^)]*\)/g, '').replace(/nexus resume[^),;]*/g, 'Resume').split(IDS)
    .map((part, index) => index % 2
      ? part.split(/\b([A-HJ-NP-Za-km-z]{3,4})(?=,|$)/).map((piece, at) => at % 2 ? jobLink(piece) : piece) : part);
}
const jobLink = (id) => el('a', {class: 'id', href: addressOf(id), 'aria-label': `Job ${id}`}, id);
