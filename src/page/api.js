// ---- Asking the service

let clockOffset = 0;
const failure = (message, hint, status, content) =>             // status 0: no answer has come
  Object.assign(new Error(message), {hint, status, content});

// Returns the answer, and its content as text, as what `as` says, or as what `as` makes of the answer.
async function request(method, path, {headers, body, signal, timeout = ANSWER_MS, as = 'text'} = {}) {
  const token = getToken(), late = AbortSignal.timeout(timeout);
  let answer, content;
  try {
    answer = await fetch(path, {method, body, cache: 'no-store', credentials: 'omit',
      headers: token ? {...headers, Authorization: `Bearer ${token}`} : headers,
      signal: AbortSignal.any([late, signal ?? late])});
    content = await (!answer.ok ? answer.text() : typeof as === 'function' ? as(answer) : answer[as]());
  } catch (error) {
    if (signal?.aborted) throw error;
    throw late.aborted ? failure(`The service has not answered for ${timeout / 1000} seconds.`,
      'It may do what was asked all the same.', 0)
      : failure('The service cannot be reached.', 'Is it running? On its machine: nexus start', 0);
  }
  const date = Date.parse(answer.headers.get('Date') ?? '');
  if (date && Math.abs(date - Date.now() - clockOffset) > 2000) clockOffset = date - Date.now();
  if (answer.ok) return {answer, content};
  const isJson = answer.headers.get('Content-Type')?.startsWith('application/json');
  const {message = `The service answered ${answer.status}.`, hint = ''} = isJson ? JSON.parse(content) : {};
  const refusal = failure(message, hint, answer.status, content);
  if (answer.status === 401 && token === getToken()) tokenDialog ??= askForToken(refusal);
  throw refusal;
}

async function ask(method, path, {body, headers, ...options} = {}) {
  const json = body && {body: JSON.stringify(body), headers: {...headers, 'Content-Type': 'application/json'}};
  const {content} = await request(method, path, {...options, ...json});
  return content ? JSON.parse(content) : null;
}

// A browser writes a download into its file as it comes.  Where a token is needed, a link has none to send.
async function download(path, name) {
  const save = (href) => el('a', {href, download: name}).click();
  if (!getToken()) return save(path);
  const options = {timeout: DOWNLOAD_MS};
  if (globalThis.showSaveFilePicker) {
    const file = await showSaveFilePicker({suggestedName: name}).catch(() => null);             // null: it was closed
    const write = async (answer) => answer.body.pipeTo(await file.createWritable());
    return file && request('GET', path, {...options, as: write});
  }
  const {content} = await request('GET', path, {...options, as: 'blob'}), address = URL.createObjectURL(content);
  save(address);
  setTimeout(() => URL.revokeObjectURL(address), 60000);
}
