// Keeps a copy of the page, the runtime and the model, with which they work offline.
//
// The network comes first, so that what is served is what runs; the copy answers where the network does not.

const CACHE = `localattn ${registration.scope}`;

async function keepAll() {
  const { files } = await (await fetch("page.json")).json();
  const cache = await caches.open(CACHE);
  await cache.addAll(["./", "page.json", ...files]);
}

async function answer(request) {
  const cache = await caches.open(CACHE);
  let response;
  try {
    response = await fetch(request);
  } catch (error) {
    const kept = await cache.match(request);
    if (kept) return kept;
    throw error;
  }
  if (response.ok) await cache.put(request, response.clone());
  return response;
}

addEventListener("install", (event) => event.waitUntil(keepAll().then(() => skipWaiting())));
addEventListener("activate", (event) => event.waitUntil(clients.claim()));
addEventListener("fetch", (event) => {
  if (event.request.method === "GET") event.respondWith(answer(event.request));
});
