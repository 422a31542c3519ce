// ---- Which page: the overview with its filter, or a job

let homeAddress = '#/', opened = null;          // where one came from: the filter, and the job whose row it was

function route() {
  const [path, query] = location.hash.slice(1).split('?'), id = /^\/jobs\/([^/]+)$/.exec(path)?.[1];
  if (!jobPage && id) opened = document.activeElement.closest('[data-job]')?.dataset.job;
  closeLog();
  const asked = new URLSearchParams(query);
  jobPage = id ? {id: decodeURIComponent(id), line: Number(asked.get('line')) || null,
    isAtError: asked.get('at') === 'error'} : null;
  byId('overview').hidden = Boolean(id);
  byId('job').hidden = !id;
  if (id) {
    show(byId('facts'));                        // nothing of the job before
    draw();
    loadJob();
    scrollTo(0, 0);
    return byId('job').querySelector('h1').focus();
  }
  const chosen = Object.fromEntries(['text', 'status', 'group'].map((name) => [name, asked.get(name)])
    .filter(([, text]) => text));
  const isNew = JSON.stringify(chosen) !== JSON.stringify(filter), isTyping = document.activeElement === byId('filter');
  homeAddress = listAddress(chosen);
  if (!isTyping) byId('filter').value = chosen.text ?? '';
  if (isNew) {
    filter = chosen;
    limit = PAGE;
    scrollTo(0, 0);
    restart();
  }
  draw();
  if (opened && !isTyping) byId('overview').querySelector(`[data-job="${opened}"] a`)?.focus();
  opened = null;
}

byId('skip').onclick = (event) => { event.preventDefault(); byId('main').focus(); };

keepToken(getToken());
const isDocs = location.pathname.endsWith('/docs');             // /docs is this page too
if (isDocs) {
  openDocs();
} else {
  addEventListener('hashchange', route);
  route();
  follow();
}
