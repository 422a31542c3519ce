// ---- GPUs, a row for each: its load, its memory, and who has it.  Where there are nodes, they are folded by machine.
// Below them, jobs that have none, or one that cannot be seen now.

const localPlace = (gpu) => gpu.place.split(':').at(-1);        // 0, or 0.1 for a slice
const jobsOf = (gpu) => gpu.job_ids.map((id) => view.jobs[id]).filter(Boolean);
const countFree = (gpus) => `${gpus.filter((gpu) => gpu.is_available).length} of ${gpus.length} available`;

function drawGpus() {
  const gpus = Object.values(view.gpus).sort((a, b) => localPlace(a) - localPlace(b)), {slurm} = view;
  const onGpus = new Set(gpus.flatMap((gpu) => gpu.job_ids));
  const others = Object.values(view.jobs).filter((job) => isRunning(job) && !onGpus.has(job.id)).slice(0, PAGE);
  return section('gpus', slurm ? 'Slurm' : 'GPUs',
    slurm ? `${slurm.running_jobs} running, ${slurm.handed_jobs} waiting` : gpus.length > 0 && countFree(gpus),
    hasNodes() ? Object.values(view.nodes).map((node) => drawNode(node, gpus)) : drawRows(gpus),
    drawSharing(),
    others.length > 0 && el('ul', {class: 'rows panel', key: 'others'}, others.map((job) => drawJob(job))));
}

function drawSharing() {                        // users with services of their own, who take turns with this one
  const {others, next_turn: next} = view, isOwn = view.is_owner && next === view.user;
  const drawUser = ({user, running, waiting, since, collects}) => el('li', {key: user}, el('b', {}, user), ` ${listed(
    `${number(running)} running`, `${number(waiting)} waiting${since ? ` for ${about(secondsSince(since))}` : ''}`,
    collects && `collects ${collects} GPUs for one job`)}`);
  return others.length > 0 && el('div', {id: 'sharing', class: 'panel pad small', role: 'group',
    'aria-label': 'Other users of these GPUs'}, el('p', {class: 'muted'}, 'Other users of these GPUs, by turns'),
  el('ul', {}, others.map(drawUser)), next && el('p', {}, 'Next GPU: ',
    el('b', {}, isOwn ? view.counts.pending ? 'yours' : 'yours, if you add a job' : next)));
}

function drawRows(gpus) {
  const columns = chooseColumns(GPU_COLUMNS, gpus);
  const drawGpu = (gpu) => el('li', {key: gpu.uuid, 'data-gpu': gpu.place,
    class: `gpu ${jobsOf(gpu).some((job) => job.idle_since) ? 'warn' : ''}`}, drawCells('div', columns, gpu));
  return gpus.length > 0 && el('ul', {class: 'rows panel'},
    el('li', {class: 'gpu heading', 'aria-hidden': 'true'}, drawHeadings('span', columns)), gpus.map(drawGpu));
}

function nodeBadge({trouble, unknown_since: since, is_leaving: isLeaving}) {
  if (since) return badge('Unknown', `unknown since ${clock(since)}`);
  if (isLeaving) return badge('Paused', 'being removed');
  return trouble && badge('Paused', 'closed');
}

function drawNode(node, all) {
  const {name, trouble, hint} = node, gpus = all.filter((gpu) => gpu.node === name);
  return el('details', {key: name, 'data-machine': name, open: all.length <= MANY_GPUS}, el('summary', {},
    el('h3', {}, name), nodeBadge(node),
    muted(listed(gpus.length > 0 && countFree(gpus), node.running_jobs && counted(node.running_jobs, 'job'),
      node.gpu_names.join(', '))),
    trouble && el('span', {class: 'red'}, trouble, hint && `. To do: ${hint}`)), drawRows(gpus));
}
