// ---- The form of a job: a new one, or one that is changed

const FIELDS = FORM_ROWS;                       // a job's fields, from their table: see form_rows()
const READ = {                                  // the JSON of an input; the service parses times, sizes and lists
  boolean: () => true, number: Number, integer: Number,
  object: (text) => Object.fromEntries(splitLines(text).map(readVariable)), array: (text) => splitLines(text)
};

function splitLines(text) {
  return text.split('\n').map((line) => line.replace(/\r$/, '')).filter((line) => line.trim());
}

function readVariable(line) {                   // NAME=VALUE; a name alone has the value null
  const match = /^([^=]*)=(.*)/.exec(line);     // without the \r that a form ends its lines with
  return match ? match.slice(1) : [line, null];
}

const INPUTS = {                                // {a unit: what may be typed for the JSON of a field}
  duration: (seconds) => duration(seconds, 4), size: (mib) => `${mib}M`, priority: (rank) => PRIORITIES[rank] ?? rank
};

function showInput({type, unit}, fact) {        // what an input shows of a job's field
  if (!isSet(fact)) return null;
  return type === 'array' ? fact.join('\n') : INPUTS[unit]?.(fact) ?? fact;
}

function drawField({name, type, unit, like, label, help}, job) {
  const id = `field-${name}`, isLong = name === 'command' || ['object', 'array'].includes(type);
  const value = showInput({type, unit}, job[name]);
  const kind = READ[type] === Number ? {type: 'number', min: 0, step: 'any'} : {type: type === 'boolean' && 'checkbox'};
  const facts = {id, name, autocomplete: 'off', spellcheck: 'false', 'aria-describedby': `${id}-help`,
    placeholder: view?.defaults[name] ?? like, required: name === 'command'};
  const input = isLong ? el('textarea', {...facts, rows: 3}, value)
    : el('input', {...facts, ...kind, ...(type === 'boolean' ? {checked: value} : {value})});
  return el('div', {class: isLong && 'all'},
    type === 'boolean' ? el('label', {}, input, ` ${label}`) : [el('label', {for: id}, label), input],
    el('span', {class: 'help', id: `${id}-help`}, worded(help)));
}

// `kind`: of FIELDS' forms.  send(asked, refuse, key) does it with what was filled in, changed or emptied (null); an
// equal request has an equal key.  `preset`: what is filled in, and sent, where nothing else is typed.
function openForm(kind, title, verb, job, send, preset = {}) {
  const newKey = () => crypto.getRandomValues(new BigUint64Array(2)).join('-');
  let key = newKey();
  const rows = FIELDS.filter(({name, forms}) => forms.includes(kind) && (name !== 'node' || hasNodes()));
  const given = {...job, node: job?.only_node};
  const drawFields = (isFirst) => el('div', {class: 'form'},
    rows.filter(({first}) => first === isFirst).map((row) => drawField(row, given)));
  const error = el('p', {class: 'red', role: 'alert'});
  const go = el('button', {class: 'primary', title: 'Ctrl+Enter'}, verb);
  const note = el('p', {class: 'help', role: 'status'});
  const others = el('details', {open: Boolean(job)}, el('summary', {}, 'More: priority, retries, \u2026'),
    drawFields(false));
  const form = el('form', {oninput: () => { key = newKey(); tellCount(); }, onsubmit: submit}, drawFields(true), note,
    others, error, el('div', {class: 'buttons'}, button('Close', () => byId('dialog').close()), go));
  const former = new FormData(form), place = listed(kind, job?.id), draft = drafts.get(place);
  for (const [name, text] of Object.entries(preset)) form.elements[name].defaultValue = text ?? '';
  const begun = `${[...new FormData(form)]}`;
  let isSent = false;
  function collect() {
    const texts = new FormData(form), asked = {};
    for (const {name, type} of rows) {
      const text = texts.get(name)?.trim() ?? '';
      if (text !== (former.get(name) ?? '')) asked[name] = text ? (READ[type] ?? String)(text) : null;
    }
    return asked;
  }
  async function tellCount() {                  // how many jobs a sweep makes, once the typing pauses
    const asked = collect(), mine = key;
    await sleep(asked.sweep ? COUNT_PAUSE_MS : 0);
    if (mine !== key) return;
    let text = '', name = verb;
    if (asked.sweep) try {
      const {answer, content} = await request('POST', 'queue?limit=1', {body: JSON.stringify({...asked, dry_run: true}),
        headers: {'Content-Type': 'application/json'}});
      const count = Number(answer.headers.get('Total-Count')), [first] = JSON.parse(content).jobs;
      name = count > 1 ? `Add ${number(count)} jobs` : verb;
      text = `${counted(count, 'job')}, the first: ${first?.command}`;
    } catch (refusal) {
      text = sentences(refusal);
    }
    if (mine !== key) return;
    show(note, text);
    show(go, name);
  }
  async function submit(event) {
    event.preventDefault();
    if (go.disabled) return;
    go.disabled = true;
    show(error);
    isSent = Boolean(await send(collect(), (refusal) => show(error, sentences(refusal)), key));
    if (isSent) drafts.delete(place);           // the dialog may be closed by now
    if (isSent) byId('dialog').close();
    go.disabled = false;
  }
  if (draft) {
    key = draft.key;
    fillIn(form, draft.texts);
    tellCount();
    others.open ||= Boolean(others.querySelector('.changed'));
    const offer = el('p', {class: 'head banner busy'}, el('span', {class: 'grow'}, 'This is what you typed before.'),
      button('Start anew', () => { form.reset(); offer.remove(); form.oninput(); form.elements[0].focus(); }));
    form.prepend(offer);
  }
  form.querySelector('input, textarea').autofocus = true;
  openDialog(title, form).then(() => {
    const texts = new FormData(form), isChanged = `${[...texts]}` !== begun;
    if (isChanged && !isSent) drafts.set(place, {texts, key});
    else drafts.delete(place);
  });
}

const drafts = new Map();                       // {form and job: what was typed there and not sent}

function fillIn(form, texts) {                  // what differs is marked as changed
  for (const input of form.querySelectorAll('[name]')) {
    const text = texts.get(input.name) ?? '', isBox = input.type === 'checkbox';
    input.classList.toggle('changed', isBox ? input.checked !== Boolean(text) : input.value !== text);
    if (isBox) input.checked = Boolean(text);
    else input.value = text;
  }
}

addEventListener('keydown', (event) => {        // Ctrl+Enter or Cmd+Enter sends the form that one types in
  if (event.key !== 'Enter' || !(event.ctrlKey || event.metaKey) || !event.target.form) return;
  event.preventDefault();
  if (event.target.matches('input, textarea')) event.target.form.requestSubmit();
});

byId('add').onclick = async () => {             // where the user's last job runs
  const query = new URLSearchParams({...(view && {user: view.user}), sort: '-created_at', limit: 1, fields: 'cwd'});
  const [last] = await ask('GET', `jobs?${query}`).catch(() => []);
  openForm('add', 'Add a job', 'Add job', null, (asked, refuse, key) =>
    act('POST', 'queue', asked, ({id, ids, warning = ''}) =>
      `${ids ? `${counted(ids.length, 'job')} were` : `Job ${id} was`} added. ${warning}`, refuse,
    {'Idempotency-Key': key}), {cwd: last?.cwd});
};
