// Keeps a copy of the page, the runtime and the model, with which they work offline.
//
// The network comes first, so that what is served is what runs; the copy answers where the network does not. A copy is
// of one bundle, whole: its digest is in this script's address, so that another bundle at the same address brings
// another worker, whose copy takes the place of this one.

const PREFIX = `localattn ${registration.scope}`;
const DIGEST = new URL(location.href).searchParams.get("bundle");
const CACHE = `${PREFIX} ${DIGEST}`;
// A copy is of what the server has. Servers compare times, so a file of the same second, or an older one put in its
// place, would pass for the one that the browser keeps.
const FROM_SERVER = { cache: "reload" };

async function keepAll() {
  const { digest, files } = await (await fetch("page.json", FROM_SERVER)).json();
  if (digest !== DIGEST) throw new Error("Another bundle is served now; its own worker keeps it.");
  const cache = await caches.open(CACHE);
  await cache.addAll(["./", "page.json", ...files].map((address) => new Request(address, FROM_SERVER)));
}

async function removeOthers() {
  const names = (await caches.keys()).filter((name) => name === PREFIX || name.startsWith(`${PREFIX} `));
  await Promise.all(names.filter((name) => name !== CACHE).map((name) => caches.delete(name)));
}

async function answer(request) {
  try {
    return await fetch(request);
  } catch (error) {
    const kept = await (await caches.open(CACHE)).match(request, { ignoreSearch: true });
    if (kept) return kept;
    throw error;
  }
}

addEventListener("install", (event) => event.waitUntil(keepAll().then(() => skipWaiting())));
addEventListener("activate", (event) => event.waitUntil(removeOthers().then(() => clients.claim())));
addEventListener("fetch", (event) => {
  if (event.request.method === "GET") event.respondWith(answer(event.request));
});
