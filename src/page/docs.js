// ---- /docs: the content of /openapi.json, and a form to send each call

const quote = (text) => `'${text.replaceAll("'", "'\\''")}'`;
const pretty = (text) => { try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; } };
const marked = (text) => text.split(/`([^`]+)`/).map((piece, index) => index % 2 ? el('code', {}, piece) : piece);
let shapes = {};

function typeOf(schema) {                       // the type in a word or two
  if (!schema) return '';
  if (schema.$ref) return schema.$ref.split('/').pop();
  if (schema.enum) return schema.enum.join(' | ');
  if (schema.anyOf) return schema.anyOf.map(typeOf).filter((name) => name !== 'null').join(' | ');
  if (schema.type === 'array') return `(${typeOf(schema.items) || 'any'})[]`.replace(/\((\w+)\)/, '$1');
  return schema.format ?? (schema.type === 'object' && schema.title || schema.type || 'any');
}

function fieldsOf(schema) {                     // [name, schema] of each
  const shape = schema?.anyOf?.map((each) => shapes[typeOf(each)]).find(Boolean) ?? schema;
  return Object.entries(shape?.properties ?? {});
}

const listFields = (title, fields) => fields.length > 0 && [el('h3', {}, title), el('dl', {},
  fields.map(([name, {description = '', ...type}]) => {
    const word = typeOf(type), shape = word.replace('[]', '');
    return [el('dt', {}, el('code', {}, name)), el('dd', {}, marked(description), ' ', el('span', {class: 'help'},
      shapes[shape] ? el('a', {href: `#shape-${shape}`}, word) : word))];
  }))];

function readReply([status, reply]) {           // [status, schema]
  if (status === 'default') return ['otherwise', {$ref: 'Error'}];
  const [kind, media] = Object.entries(reply.content ?? {})[0] ?? ['no content', {}];
  return [status, kind === 'application/json' ? media.schema : {type: kind}];
}

function drawCall(path, method, {operationId: id, summary, parameters, requestBody, responses}) {
  const [kind, media] = Object.entries(requestBody?.content ?? {})[0] ?? [];
  const schema = media?.schema, isJson = kind === 'application/json';
  const shape = shapes[typeOf(schema)] ?? schema, files = kind && !isJson ? fieldsOf(shape) : [];
  const example = path.slice(1).replace(/{\w+}/g, (name) => name.slice(1, -1).toUpperCase()) || '.';
  const address = el('input', {'aria-label': 'Address', spellcheck: 'false', value: example});
  const body = isJson && el('textarea', {'aria-label': 'Body', rows: 6, spellcheck: 'false'},
    pretty(JSON.stringify(shape.examples?.[0] ?? {})));
  const curl = el('pre', {tabindex: 0, 'aria-label': 'the same with curl'});
  const answer = el('div', {'aria-live': 'polite'}), send = el('button', {class: 'primary'}, 'Send');
  const oninput = () => {
    const words = ['curl'];
    if (method !== 'GET') words.push(`-X ${method}`);
    if (getToken()) words.push('-H "Authorization: Bearer $NEXUS_TOKEN"');
    if (isJson) words.push(`-H 'Content-Type: ${kind}' -d ${quote(body.value)}`);
    for (const [name] of files) words.push(`-F ${name}=@${name}`);
    words.push(quote(new URL(address.value, document.baseURI).href));
    show(curl, words.join(' '));
  };
  async function onsubmit(event) {
    event.preventDefault();
    send.disabled = true;
    show(answer, 'Asking \u2026');
    const asked = {timeout: TRIAL_MS};
    if (isJson) Object.assign(asked, {headers: {'Content-Type': kind}, body: body.value});
    let status, content;
    try {
      const reply = await request(method, address.value, asked);
      status = `${reply.answer.status} OK`;
      content = reply.content;
    } catch (error) {
      status = error.status || error.message;
      content = error.content;
    }
    show(answer, el('p', {}, status), el('pre', {tabindex: 0, 'aria-label': 'the answer'},
      pretty(content)?.slice(0, ANSWER_LENGTH)));
    send.disabled = false;
  }
  oninput();
  return el('details', {class: 'panel pad', id},
    el('summary', {}, el('b', {}, method), el('code', {}, path), muted(marked(summary))),
    listFields('Parameters', parameters.map(({name, schema: type, description}) => [name, {...type, description}])),
    listFields('Body', fieldsOf(shape)), listFields('Answers', Object.entries(responses).map(readReply)),
    el('h3', {}, 'With curl'), curl, !files.length && el('form', {oninput, onsubmit},
      el('h3', {}, 'From here'), address, body, el('div', {class: 'buttons'}, send), answer));
}

async function openDocs() {
  document.body.className = 'docs';
  document.title = 'nexus: the API';
  byId('docs').hidden = false;
  const {info, paths, components} = await ask('GET', 'openapi.json');
  shapes = components.schemas;
  show(byId('about'), `${info.description}\n\nVersion ${info.version}`.split('\n\n')
    .map((text) => el('p', {}, marked(text))));
  byId('calls').append(el('h2', {}, 'Calls'),
    ...Object.entries(paths).flatMap(([path, methods]) =>
      Object.entries(methods).map(([method, facts]) => drawCall(path, method.toUpperCase(), facts))),
    el('h2', {}, 'Objects'), ...Object.entries(shapes).map(([name, schema]) => el('details',
      {class: 'panel pad', id: `shape-${name}`}, el('summary', {}, el('code', {}, name)),
      listFields('Fields', fieldsOf(schema)))));
}
