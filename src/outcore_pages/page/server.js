// Asking the server, with its key where it has one.

let key = sessionStorage.getItem("outcore-key") || "";
let asking = null;

function askKey() {
  if (!asking) asking = new Promise(done => {
    const dialog = document.getElementById("keys"), field = document.getElementById("key");
    dialog.addEventListener("close", () => {
      key = field.value.trim();
      sessionStorage.setItem("outcore-key", key);
      asking = null;
      done();
    }, {once: true});
    dialog.showModal();
  });
  return asking;
}
export async function ask(path, options = {}) {
  for (;;) {
    const headers = {...options.headers}, used = key;
    if (used) headers["Authorization"] = "Bearer " + used;
    const response = await fetch(path, {...options, headers});
    if (response.status !== 401) return response;
    if (used === key) await askKey();  // else it was given meanwhile
  }
}
export async function* events(response) {
  const decoder = new TextDecoder(), reader = response.body.getReader();
  let rest = "";
  try {
    for (;;) {
      const {done, value} = await reader.read();
      if (done) return;
      const lines = (rest + decoder.decode(value, {stream: true})).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6).trim();
    }
  } finally { reader.cancel().catch(() => {}); }
}
export async function wrongOf(response) {
  const text = await response.text();
  try { return JSON.parse(text).error.message || text; } catch { return text || response.statusText; }
}
// Each with what it takes of images, or null.
export async function models() {
  return (await (await ask("v1/models")).json()).data.map(model => ({name: String(model.id), images: model.images || null}));
}
export async function loads() {
  return (await (await fetch("health")).json()).status === "loading";
}
// Of a folder on the server, its last part.
export const short = name => name.startsWith("/") ? name.split("/").filter(Boolean).pop() || name : name;
