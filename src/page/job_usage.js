// ---- What a job uses of its GPUs: a chart for each reading, on the job's page

async function loadUsage(page) {                // when it is opened, then each minute, and at its end
  const {job, usage} = page, state = `${job?.attempt} ${isOver(job)}`;
  const isNew = usage?.state !== state || (!isOver(job) && Date.now() > usage.askedAt + 60000);
  if (!job?.attempt || !job.gpus || !isNew) return;
  page.usage = {...usage, state, askedAt: Date.now()};
  try {
    Object.assign(page.usage, await ask('GET', `${pathOf(page.id)}/usage`));
    if (jobPage === page) drawJobPage();
  } catch (error) {
    if (![0, 401, 403, 404].includes(error.status)) complain(error);
  }
}

const CHARTS = [['utilization', 'Load', percent, 100], ['memory_used_mib', 'Memory', size],
  ['power_watts', 'Power', (watts) => `${Math.round(watts)} W`],
  ['temperature', 'Temperature', (degrees) => `${Math.round(degrees)} \u00b0C`]];

function drawUsage({gpus, note}) {
  const charts = CHARTS.map(([key, word, form, top]) => {
    const told = gpus.filter((gpu) => isSet(gpu.max[key])), most = Math.max(...told.map((gpu) => gpu.max[key]));
    const mean = told.reduce((sum, gpu) => sum + gpu.mean[key], 0) / told.length;
    const words = `mean ${form(mean)}, max ${form(most)}`, scale = top ?? (1.1 * most || 1);
    return told.length > 0 && el('figure', {key}, el('figcaption', {}, el('b', {}, word), ' ', muted(words)),
      svg('svg', {class: 'chart', role: 'img', 'aria-label': `${word}: ${words}`, preserveAspectRatio: 'none',
        viewBox: `0 0 ${told[0][key].length} 100`}, told.map((gpu) => drawArea(gpu[key], scale)),
      told.map((gpu) => drawCurve(gpu[key], scale))));
  });
  return section('usage', gpus.length > 1 ? 'Its GPUs' : 'Its GPU', note, charts.some(Boolean)
    && el('div', {class: 'charts'}, charts));
}

// A step each; where nothing was recorded there is nothing.
const heightOf = (value, top) => (98 - 94 * value / top).toFixed(1);
const drawArea = (numbers, top) => svg('path', {class: 'area', d: numbers.map((value, index) =>
  isSet(value) ? `M${index} 100V${heightOf(value, top)}H${index + 1}V100` : '').join('')});
const drawCurve = (numbers, top) => svg('path', {d: numbers.map((value, index) => isSet(value)
  ? `${isSet(numbers[index - 1]) ? 'L' : 'M'}${index} ${heightOf(value, top)}H${index + 1}` : '').join('')});
