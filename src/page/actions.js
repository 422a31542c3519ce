// ---- Actions: what buttons do with jobs, groups, GPUs and the queue

// Does a button's work; says when it is done, or why it failed.
async function act(method, path, body, done, refuse = complain, headers = {}, undo = null) {
  try {
    const answer = await ask(method, path, {body, headers});
    tell(typeof done === 'function' ? done(answer) : done, undo && (() => undo(answer)));
    wake();
    loadJob();
    return answer ?? true;
  } catch (error) {
    return refuse(error);
  }
}

// Asks the user; returns what the dialog was closed with, if anything.
function openDialog(title, ...children) {
  const dialog = byId('dialog');
  dialog.replaceChildren(el('h2', {id: 'dialog-title'}, title), ...children);
  dialog.returnValue = '';
  dialog.showModal();                           // closing it gives the focus back
  return new Promise((resolve) => { dialog.onclose = () => resolve(dialog.returnValue); });
}

async function cancel(name, detail, chosen) {
  const loss = 'What runs is asked to end, then killed: what it has not saved is lost. Jobs that wait for its success '
    + 'are cancelled, too.';
  const isSure = await openDialog(`Cancel ${name}?`, el('p', {}, loss), el('pre', {tabindex: 0}, detail),
    el('form', {method: 'dialog', class: 'buttons'}, el('button', {value: '', autofocus: true}, 'Keep'),
      el('button', {value: 'yes', class: 'primary danger'}, `Cancel ${name}`)));
  if (isSure) await act('POST', 'jobs/cancel', chosen, `Cancelled ${name}.`);
}

const cancelJob = (job) => cancel(`job ${job.id}`, [job.name, commandOf(job)].filter(Boolean).join('\n'),
  {ids: [job.id]});
const cancelGroup = ({name, pending, running}) => cancel(`group ${name}`,
  `${number(running)} running, ${number(pending)} waiting`, {group: name});

async function retry(chosen, change, refuse) {  // chosen: {ids} or {group}; change: what is to be otherwise
  const done = ({ids, warning}) => {
    const [id = ''] = chosen.ids ?? [];
    const isOne = ids.length === 1;
    return listed(isOne ? `Job ${id} runs again as ${ids[0]}.` : `${counted(ids.length, 'job')} run again.`, warning);
  };
  const added = await act('POST', 'jobs/retry', {...chosen, change}, done, refuse);
  const left = added?.downstream ?? [];
  if (left.length > 0) {
    tell(`${counted(left.length, 'job')} that came after it ${left.length > 1 ? 'stay' : 'stays'} cancelled.`,
      () => retry({ids: left}), 'Run again too');
  }
  if (added && jobPage) location.hash = addressOf(added.ids[0]);
  return added;
}

const edit = (id, change, done, refuse) => act('PATCH', `queue/${id}`, change, `Job ${id} ${done}.`, refuse);
const holdButton = ({id, is_held: isHeld}) => action(isHeld ? 'Resume' : 'Hold', `job ${id}`,
  () => edit(id, {is_held: !isHeld}, isHeld ? 'was resumed' : 'was held'), {class: null, key: 'hold'});

// Of the queue, a group or a GPU.
function pauseButton(isPaused, name, path, {query = '', noun = '', kind = 'quiet'}) {
  const verb = isPaused ? 'Resume' : 'Pause', label = `${verb} ${name}`;
  const done = isPaused ? `Resumed ${name}.` : `Paused ${name}: what runs goes on, nothing new starts.`;
  return view.is_owner && button(verb + noun, () => act('POST', `${path}/${verb.toLowerCase()}${query}`, null, done),
    {class: isPaused ? null : kind, 'aria-label': label, title: label});
}
