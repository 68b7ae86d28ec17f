// Conversations, kept in this browser only (IndexedDB). Where the browser keeps nothing, they last as long as the page.

let base = null;

const result = request => new Promise((done, failed) => {
  request.onsuccess = () => done(request.result);
  request.onerror = () => failed(request.error);
});
export async function stored() {
  const opening = indexedDB.open("outcore", 1);
  opening.onupgradeneeded = () => opening.result.createObjectStore("chats", {keyPath: "id"});
  base = await result(opening);
  const found = await result(base.transaction("chats").objectStore("chats").getAll());
  return found.map(checked).filter(Boolean);
}
export function keep(chat) { return changed(chats => chats.put(chat)); }
export function forget(id) { return changed(chats => chats.delete(id)); }
function changed(change) {
  if (!base) return Promise.resolve();
  return new Promise((done, failed) => {
    const transaction = base.transaction("chats", "readwrite");
    transaction.oncomplete = done;
    // Where there is no room the request may succeed and the transaction be aborted.
    transaction.onabort = transaction.onerror = () => failed(transaction.error || new Error("not stored"));
    change(transaction.objectStore("chats"));
  });
}

export function newChat(like = {}) {
  const {model = "", system = "", temperature = "", tokens = ""} = like;
  return {id: crypto.getRandomValues(new Uint32Array(3)).join("-"), title: "", changed: Date.now(), model, system,
    temperature, tokens, messages: []};
}
const IMAGE = /^data:image\/(png|jpeg);base64,[A-Za-z0-9+/]+=*$/;  // as images.js makes them
// A conversation with fields of the right types only, or null: files that are imported may hold anything.
export function checked(value) {
  if (!value || typeof value !== "object" || !Array.isArray(value.messages)) return null;
  const text = (of, field) => typeof of?.[field] === "string" ? of[field] : "";
  const number = (of, field) => Number.isFinite(of?.[field]) ? of[field] : "";
  const messages = value.messages.filter(one => ["user", "assistant"].includes(one?.role)).map(one => ({
    role: one.role, content: text(one, "content"), reasoning: text(one, "reasoning"), about: text(one, "about"),
    wrong: text(one, "wrong"), cut: one.cut === true, seconds: number(one, "seconds") || 0,
    files: (Array.isArray(one.files) ? one.files : []).map(file => ({name: text(file, "name"), text: text(file, "text"),
      image: IMAGE.test(text(file, "image")) ? file.image : ""})),
  }));
  const chat = newChat({model: text(value, "model"), system: text(value, "system"),
    temperature: number(value, "temperature"), tokens: number(value, "tokens")});
  return {...chat, id: /^[\w-]{1,64}$/.test(text(value, "id")) ? value.id : chat.id, title: text(value, "title").slice(0, 200),
    changed: number(value, "changed") || chat.changed, messages};
}

// What goes to the model for a message, and into an export: its files come first, fenced.
export function whole(message) {
  const files = message.files.filter(file => !file.image).map(file => {
    const longest = Math.max(2, ...(file.text.match(/`+/g) || []).map(run => run.length));
    const fence = "`".repeat(longest + 1), kind = /\.(\w+)$/.exec(file.name)?.[1] || "";
    return `${file.name}:\n${fence}${kind}\n${file.text.replace(/\n?$/, "\n")}${fence}\n`;
  });
  return [...files, message.content].join("\n");
}
export function asMarkdown(chat) {
  const parts = [`# ${chat.title || "Conversation"}`];
  if (chat.system) parts.push("## System prompt", chat.system);
  for (const message of chat.messages) {
    parts.push(message.role === "user" ? "## You" : "## " + (chat.model || "Answer"));
    if (message.reasoning) parts.push(message.reasoning.trim().replace(/^/gm, "> "));
    parts.push(...message.files.filter(file => file.image).map(file => `(image: ${file.name})`));
    if (whole(message).trim()) parts.push(whole(message).trim());
  }
  return parts.join("\n\n") + "\n";
}
export const asJson = chats => JSON.stringify({format: "outcore-chats/1", chats}, null, 1) + "\n";
export function fromJson(text) {
  const value = JSON.parse(text);
  return (Array.isArray(value?.chats) ? value.chats : [value]).map(checked).filter(Boolean);
}
