// ---- Names of jobs.  A row of a sweep or a group has a label, which tells it from the others and is never cut.  Of
// other names, what one has in common with another one is cut, where there is no room, and not what tells them apart.

const nameOf = (job) =>
  job.name ?? commandOf(job).replace(/^(\S*\/)?(python[\d.]*|bash|sh)\s+(?=[^-\s])(\S*\/)?/, '');
const titleOf = (job) => job.label ?? nameOf(job);
let commonLengths = new Map();                  // {title: characters at its begin that another one has too}

function measureNames() {
  const titles = [...new Set([...Object.values(view.jobs).map(nameOf), ...Object.keys(view.groups)])].sort();
  const common = (one = '', other = '') => {
    let length = 0;
    while (length < one.length && one[length] === other[length]) length += 1;
    length = one.slice(0, length).search(/[^\s=/_.,:-]*$/);      // whole words
    return length < 8 ? 0 : length;
  };
  commonLengths = new Map(titles.map((title, index) =>
    [title, Math.max(common(title, titles[index - 1]), common(title, titles[index + 1]))]));
}

function fitNames() {                           // in each list, they have the room that its longest name takes
  for (const list of byId('overview').querySelectorAll('section')) {
    const lengths = [...list.querySelectorAll('.job .name')].map(({textContent}) => textContent.length);
    list.style.setProperty('--name', `${Math.max(0, ...lengths)}ch`);
  }
}

const drawRowLabel = (label, group) => el('span', {class: 'name label title'},        // its words are never parted
  label.split(' ').map((word, index) => [index > 0 && ' ', el('span', {class: 'word'}, word)]),
  group && el('span', {class: 'group-name quiet muted'}, ` ${group}`));

function drawName(title, kind) {
  const length = commonLengths.get(title) ?? 0;
  return el('span', {class: `name ${kind}`}, el('span', {class: 'clip'}, title.slice(0, length)),
    el('span', {class: 'clip'}, title.slice(length)));
}
