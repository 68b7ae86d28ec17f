// llama.cpp's page leaves a worker in browsers that would go on showing it at this address. Browsers ask for this file
// to update that worker; this one removes itself and what was kept.
self.addEventListener("install", () => self.skipWaiting());
self.addEventListener("activate", (event) => event.waitUntil(remove()));

async function remove() {
  for (const key of await caches.keys()) await caches.delete(key);
  await self.registration.unregister();  // last: a worker without a page ends here
  for (const tab of await self.clients.matchAll({ type: "window" })) tab.navigate(tab.url);
}
