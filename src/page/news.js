// ---- The one channel: GET /status?after=VERSION answers when something has changed, with what has changed

let view = null, version = 0;                   // what is shown, as the service describes it, and its version
let filter = {}, limit = PAGE;                  // {text, status, group} of the lists, and their length
let following = null, wake = () => {};
const isFiltered = () => Object.keys(filter).length > 0;
const pause = (milliseconds) => new Promise((resolve) => { setTimeout(resolve, milliseconds); wake = resolve; });

function merge(former, changes) {               // a JSON merge patch: RFC 7396
  if (changes === null || typeof changes !== 'object' || Array.isArray(changes)) return changes;
  const merged = Object.assign(Object.create(null), former);    // a group may be called constructor, or __proto__
  for (const [name, change] of Object.entries(changes)) {
    if (change === null) delete merged[name];
    else merged[name] = merge(merged[name], change);
  }
  return merged;
}

// A browser has six connections to a service, for all its tabs: a hidden one asks for everything now and then, and
// holds none.
async function follow() {
  let delay = 500;
  for (;;) {
    await tokenDialog;
    following = new AbortController();
    const {signal} = following;
    const query = new URLSearchParams({...filter, limit, after: document.hidden ? 0 : version});
    try {
      const changes = await ask('GET', `status?${query}`, {signal, timeout: SILENCE_MS});
      view = merge(changes.is_whole ? {} : view, changes);
      version = view.state_version;
      delay = 500;
      showConnection(...view.bad_checks.length ? ['warn', 'not well'] : ['ok', 'live']);
      if (jobPage && hasNewsOfJob(changes)) loadJob();
      draw();
      await pause(document.hidden ? HIDDEN_PAUSE_MS : NEWS_PAUSE_MS);
    } catch (error) {
      if (signal.aborted || tokenDialog) continue;
      if (isSet(error.status)) showConnection('bad', 'reconnecting');
      if (error.status !== 0) complain(error);
      await pause(delay * (0.75 + Math.random() / 2));
      delay = Math.min(15000, delay * 1.7);
    }
  }
}

function restart() {                            // with another filter or length
  version = 0;
  following?.abort();
  wake();
}

document.addEventListener('visibilitychange', () => document.hidden || wake());

function showConnection(kind, text) {
  const isLost = kind === 'bad';                // the page shows the past: no clock ticks, nothing can be done
  byId('connection').className = `badge ${kind}`;
  show(byId('connection'), text);
  if (isLost && byId('offline').hidden) show(byId('offline'),
    `Not connected since ${clock(new Date())}: what is shown here is of then, and nothing can be done. Jobs go on.`);
  document.body.classList.toggle('offline', isLost);
  byId('offline').hidden = !isLost;
}

setInterval(() => {
  for (const node of document.querySelectorAll('body:not(.offline) [data-since]')) {
    show(node, duration(secondsSince(node.dataset.since)));
  }
}, 1000);
