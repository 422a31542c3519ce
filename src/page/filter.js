// ---- The filter of the lists, its address, and the key that leads to it

function listAddress(wanted) {
  const query = new URLSearchParams(Object.entries(wanted).filter(([, text]) => text));
  return query.size ? `#/?${query}` : '#/';
}

const groupAddress = (group, status) => listAddress({group, status});

byId('filter').oninput = ({target}) => {
  history.replaceState(null, '', listAddress({...filter, text: target.value.trim()}));
  route();
};
addEventListener('keydown', (event) => {
  const {key, target} = event, isSearching = search?.found.length > 0;
  if (target.matches('input:not([type=checkbox]), textarea') || isDocs || byId('dialog').open) return;
  if (event.ctrlKey || event.metaKey || event.altKey || !(key === '/' || 'nN'.includes(key) && isSearching)) return;
  event.preventDefault();
  if (key !== '/') stepSearch(key === 'n' ? 1 : -1);
  else if (log) openSearch();
  else byId('filter').focus();
});
