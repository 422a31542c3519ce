// nexus has no service worker.  A browser that asks for one got it from another user's program on this port, and it
// would go on answering in place of nexus.  This script replaces it: it unregisters itself and reloads the open tabs.
addEventListener('install', () => skipWaiting());
addEventListener('activate', (event) => event.waitUntil((async () => {
  for (const name of await caches.keys()) await caches.delete(name);
  await registration.unregister();
  for (const tab of await clients.matchAll({type: 'window'})) tab.navigate(tab.url);
})()));
