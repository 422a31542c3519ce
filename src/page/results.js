// ---- The results of a group: a table, which is asked for when something of the group has changed

let results = {};                               // {group, order, over, pages, table, state, isAsking, at}
const resultsPath = (group) => `groups/${encodeURIComponent(group)}/results`;

function drawResults(group) {
  if (results.group !== group.name) results = {group: group.name, order: null, pages: 1, at: 0};
  loadResults(group);
  const {table} = results;
  if (!table) return section('results', 'Results', null, el('p', {class: 'panel pad muted'}, 'Loading \u2026'));
  const {columns, rows, total} = table, left = total - rows.length, label = `Results of group ${group.name}`;
  const isFolded = results.pages === 1 && rows.length < RESULTS_PAGE;     // what waits
  const what = isSet(table.over) ? 'row' : 'job';
  const note = left > 0 ? `${number(rows.length)} of ${counted(total, what)}` : counted(total, what);
  return el('section', {id: 'results', 'aria-label': 'Results'},
    el('div', {class: 'head'}, el('h2', {}, 'Results'), muted(note),
      drawMeanSwitch(table), button('Download CSV', downloadResults, {class: 'link'})),
    el('div', {class: 'panel results', role: 'region', 'aria-label': label, tabindex: 0}, el('table', {},
      el('thead', {}, el('tr', {}, columns.map(drawHeading))), el('tbody', {}, rows.map(makeRow(table))))),
    el('p', {class: 'pad', key: 'more'},
      left > 0 && button(`${number(left)} more${isFolded ? ', waiting' : ''}`,
        () => changeResults({pages: results.pages + 1}), {class: 'link', key: 'more'})));
}

// Jobs that differ only in their seed, as one row; the button is there where a sweep has a seed.
function drawMeanSwitch({over, columns}) {
  const seed = over ?? columns.find(({key, kind}) => kind === 'sweep' && /seed/i.test(key))?.key.slice(6);
  return isSet(seed) && button(`Mean over ${seed}`, () => changeResults({over: isSet(over) ? null : seed, order: null}),
    {class: 'link', 'aria-pressed': String(isSet(over))});
}

function drawHeading({key, title, form, direction}) {           // a click sorts: the better first, then in reverse
  const {order} = results.table, better = direction === 'high' ? `-${key}` : key;
  const next = order === better ? (better === key ? `-${key}` : key) : better;
  const sorted = {[key]: 'ascending', [`-${key}`]: 'descending'}[order];
  return el('th', {scope: 'col', key, class: form, 'aria-sort': sorted},
    button(title, () => changeResults({order: next}), {class: 'link'}));
}

// The numbers of a column have as many decimals as the one with the most, up to 6.
function makeRow({columns, rows, best_id: best}) {              // returns what draws a row
  const decimalsOf = (fact) => typeof fact === 'number' && `${fact}`.split('.')[1]?.length || 0;
  const decimals = columns.map((_, index) => Math.min(6, Math.max(...rows.map(({cells}) => decimalsOf(cells[index])))));
  const figure = (fact, most) => {              // none that is not 0 becomes 0
    const text = typeof fact === 'number' ? fact.toFixed(most) : fact;
    return Math.abs(fact) < 0.001 && Number(text) !== fact ? `${Number(fact.toPrecision(4))}` : text;
  };
  const mean = (fact, deviation) => {           // with as many decimals as two digits of the deviation take
    const most = deviation ? Math.min(12, Math.max(0, 1 - Math.floor(Math.log10(deviation)))) : 0;
    return deviation ? `${fact.toFixed(most)} \u00b1 ${deviation.toFixed(most)}` : `${fact} \u00b1 0`;
  };
  const drawCell = ({key, kind, form}, index, {id, status, cells, ids, deviations}) => {
    const fact = cells[index], deviation = deviations?.[index], isLong = ['name', 'last_line'].includes(key);
    if (key === 'id') return el('th', {scope: 'row', key}, muted(MARKS[status]), ' ', jobLink(id),
      ids.length > 1 && el('span', {class: 'muted', title: ids.join(' ')}, ` +${ids.length - 1}`), id === best
      && [' \u2605', el('span', {class: 'unseen'}, 'best')]);
    if (!isSet(fact)) return el('td', {key, class: form}, muted('\u2013'));
    if (key === 'status') return el('td', {key}, badge(status));
    const text = isSet(deviation) ? mean(fact, deviation)
      : form === 'number' ? figure(fact, decimals[index]) : UNITS[form](fact);
    return el('td', {key, class: `${kind} ${form}`, title: form === 'number' && `${fact}`},
      isLong || kind === 'sweep' ? el('div', {class: isLong && 'clip', title: isLong && fact}, text) : text);
  };
  return (row) => el('tr', {key: row.id, 'data-job': row.id, class: row.id === best && 'best'},
    columns.map((column, index) => drawCell(column, index, row)));
}

function changeResults(change) {
  Object.assign(results, change, {state: null, at: 0});
  draw();
}

// What the rows were made of: as long as it is the same, nothing is asked for.
function describeGroup({name, ...group}) {
  const jobs = Object.values(view.jobs).filter((job) => job.group === name);
  return JSON.stringify([['pending', 'running', ...FINAL].map((status) => group[status]), view.ended,
    jobs.map(({id, last_line: line, metric_line: numbers}) => [id, line, numbers])]);
}

function dropColumn({columns, rows, ...table}, name) {
  const at = columns.findIndex(({key}) => key === name), keep = (_, index) => index !== at;
  return {...table, columns: columns.filter(keep), rows: rows.map(({cells, deviations, ...row}) =>
    ({...row, cells: cells.filter(keep), deviations: deviations?.filter(keep)}))};
}

async function loadResults(group) {
  const page = results, state = describeGroup(group), wait = page.at - Date.now();
  if (page.isAsking || page.state === state) return;
  if (wait > 0) {
    page.timer ??= setTimeout(() => { page.timer = null; draw(); }, wait);
    return;
  }
  Object.assign(page, {isAsking: true, state});
  const query = new URLSearchParams({limit: RESULTS_PAGE * page.pages, ...(page.order && {order: page.order}),
    ...(isSet(page.over) && {over: page.over}),
    ...(page.pages === 1 && {status: ['running', ...FINAL].join()})});
  const began = Date.now();
  try {
    const table = await ask('GET', `${resultsPath(page.group)}?${query}`);
    if (page.state === state) page.table = dropColumn(table, 'commit');      // that is long, and in the CSV
    if (!table.rows.length && page.pages === 1) Object.assign(page, {pages: 2, state: null});    // all of them wait
  } catch (error) {
    if (error.status === 0) page.state = 'lost';
    else if (error.status === 400 && (page.order || page.over)) {         // its column is gone
      Object.assign(page, {order: null, over: null, state: null});
    } else if (![401, 404].includes(error.status)) complain(error);
  }
  const rest = page.state ? Math.max(RESULTS_PAUSE_MS, 20 * (Date.now() - began)) : 0;        // null: it was changed
  Object.assign(page, {isAsking: false, at: Date.now() + rest});
  if (page === results) draw();
}

async function downloadResults() {
  const {group, order, over} = results;
  const query = new URLSearchParams({csv: true, ...(order && {order}), ...(isSet(over) && {over})});
  await download(`${resultsPath(group)}?${query}`, `${group.replace(/[^\w.-]+/g, '_')}.csv`);
}
