// The chat: conversations, their messages, and what is asked of the model.
import {Rendered, button, copyButton} from "./markdown.js";
import {imageOf, isImage} from "./images.js";
import {ask, events, models, short, wrongOf} from "./server.js";
import {asJson, asMarkdown, forget, fromJson, keep, newChat, stored, whole} from "./store.js";
import {stalledSeconds, watch} from "./watch.js";

const $ = id => document.getElementById(id);
const MOST_FILE = 1_000_000;
let served = [];  // the models, and what they take
let chats = [];  // all of this browser, the latest first
let chat = newChat();  // the one that is shown; a new one is kept with its first message
let files = [];  // attached to the message that is being written
const answers = new Map();  // by a conversation's id: what stops its answer

function element(tag, kind, text = "") {
  const made = document.createElement(tag);
  if (kind) made.className = kind;
  made.textContent = text;
  return made;
}
function notice(text, action) {
  $("notice").replaceChildren(text, " ", ...(action ? [action] : []), button("Close", () => { $("notice").hidden = true; }));
  $("notice").hidden = !text;
}

// Conversations

async function save(one) {
  one.changed = Date.now();
  if (!chats.includes(one)) chats.push(one);
  listChats();
  try { await keep(one); tabs.postMessage(one.id); } catch (e) {
    const full = e.name === "QuotaExceededError";
    notice(full ? "The browser's storage is full: this conversation is not kept. Export it, or delete others." :
      "This conversation is not kept: " + e.message);
  }
}
// What another tab has changed; what this one is answering is its own.
const tabs = new BroadcastChannel("outcore");
tabs.addEventListener("message", async ({data}) => {
  if (data.gone) await drop(data.gone);
  const found = await stored().catch(() => null);
  if (!found) return;
  const own = chats.filter(one => answers.has(one.id));
  chats = [...own, ...found.filter(one => !own.some(other => other.id === one.id))];
  const now = chats.find(one => one.id === chat.id);
  if (now && now !== chat && now.changed !== chat.changed) open(now);
  else {
    if (now && now !== chat) chats[chats.indexOf(now)] = chat;
    listChats();
  }
});
function listChats() {
  const wanted = $("find").value.toLowerCase();
  const holds = one => [one.title, ...one.messages.map(m => m.content)].some(text => text.toLowerCase().includes(wanted));
  chats.sort((a, b) => b.changed - a.changed);
  $("chats").replaceChildren(...chats.filter(one => !wanted || holds(one)).map(one => {
    const row = element("li"), link = element("a", "", one.title || "Conversation"), title = one.title || "conversation";
    link.href = "#" + one.id;
    if (one === chat) link.setAttribute("aria-current", "page");
    if (answers.has(one.id)) row.className = "busy";
    row.append(link, button("✎", () => rename(one, link), "Rename " + title), button("✕", () => remove(one), "Delete " + title));
    return row;
  }));
}
function rename(one, link) {
  const field = element("input");
  field.value = one.title;
  field.setAttribute("aria-label", "Title");
  link.replaceWith(field);
  field.select();
  let over = false;
  const end = kept => {
    if (over) return;
    over = true;
    if (kept && field.value.trim()) { one.title = field.value.trim().slice(0, 200); save(one); } else listChats();
  };
  field.addEventListener("blur", () => end(true));
  field.addEventListener("keydown", event => {
    if (event.key === "Enter") end(true);
    if (event.key === "Escape") { event.stopPropagation(); end(false); }
  });
}
async function drop(id) {
  answers.get(id)?.abort();
  chats = chats.filter(other => other.id !== id);
  await forget(id).catch(() => {});  // an answer in this tab may have kept it after another tab deleted it
  if (chat.id === id) open(newChat(chat)); else listChats();
}
async function remove(one) {
  await drop(one.id);
  tabs.postMessage({gone: one.id});
  notice(`“${one.title || "Conversation"}” is deleted.`, button("Undo", () => { save(one); open(one); notice(""); }));
}
function open(one) {
  chat = one;
  const known = chats.includes(one);
  if (location.hash.slice(1) !== (known ? one.id : "")) history.pushState(null, "", known ? "#" + one.id : location.pathname);
  document.title = one.title ? one.title + " – Outcore" : "Outcore";
  if ([...$("model").options].some(option => option.value === one.model)) $("model").value = one.model;
  document.body.classList.remove("menu");
  $("menu").setAttribute("aria-expanded", "false");
  listChats();
  showMessages();
  showSend();
  down(true);
}
function openNew() {
  open(newChat(chat));
  $("text").focus();
}
function openByAddress() {
  const one = chats.find(other => other.id === location.hash.slice(1));
  if (one && one !== chat) open(one);
  else if (!one && !location.hash && chats.includes(chat)) open(newChat(chat));
}

// Messages

const views = new WeakMap();
function showMessages() {
  $("talk").replaceChildren(...chat.messages.map(messageView));
  if (!chat.messages.length) {
    $("talk").append(element("p", "empty", "Ask the model something. What is said stays in this browser and on this server."));
  }
}
function messageView(message) {
  const mine = message.role === "user", box = element("article", "said " + message.role);
  box.setAttribute("aria-label", mine ? "You" : "Answer");
  const view = {box, thought: null, text: element("div", mine ? "text" : "text md"), about: element("span", "stats"),
    tools: element("span", "tools"), rendered: null};
  view.rendered = new Rendered(view.text);
  const foot = element("footer", "about");
  foot.append(view.about, view.tools);
  if (mine) box.append(...message.files.map(fileView));
  box.append(view.text, foot);
  views.set(message, view);
  showMessage(message, true);
  return box;
}
function picture(file) {
  const made = element("img");
  Object.assign(made, {src: file.image, alt: file.name, title: file.name});
  return made;
}
function fileView(file) {
  if (file.image) return picture(file);
  const box = element("details", "file");
  box.append(element("summary", "", file.name), element("pre", "", file.text));
  return box;
}
function showMessage(message, done) {
  const view = views.get(message);
  if (!view) return;
  if (message.role === "user") view.text.textContent = message.content;
  else {
    view.rendered.show(message.content, done);
    showThought(message, view, done);
  }
  view.about.textContent = message.about;
  if (!done) return;
  view.box.querySelector(".wrong")?.remove();
  if (message.wrong) view.text.after(element("p", "wrong", message.wrong));
  showTools(message, view);
}
function showThought(message, view, done) {
  if (!message.reasoning) return;
  if (!view.thought) {
    view.thought = element("details", "thought");
    view.thought.append(element("summary"), element("div"));
    view.box.prepend(view.thought);
  }
  const [head, body] = view.thought.children, shown = body.textContent.length;
  if (message.reasoning.startsWith(body.textContent)) body.append(message.reasoning.slice(shown));
  else body.textContent = message.reasoning;
  body.normalize();
  head.textContent = message.seconds ? `Reasoned for ${message.seconds.toFixed(0)} s` : done ? "Reasoning" : "Reasoning…";
}
function showTools(message, view) {
  const mine = message.role === "user", tools = [copyButton(() => message.content)];
  tools.push(button("Edit", () => edit(message)));
  if (!mine) {
    tools.push(button(message.wrong ? "Try again" : "Regenerate", () => again(message)));
    if (message.cut && message.content) tools.push(button("Continue", () => more(message)));
  } else {
    // Of the last message only, which may have no answer.
    tools.push(button("Answer", () => answer(chat)));
    tools.at(-1).className = "last";
  }
  view.tools.replaceChildren(...tools);
}
// The end stays in sight until somebody scrolls away from it. Messages out of sight have heights that are guessed, so that
// the end is looked for once more when they are drawn.
let following = true;
function down(always) {
  following = following || always;
  const end = () => { if (following) $("talk").scrollTop = $("talk").scrollHeight; };
  end();
  requestAnimationFrame(end);
}
function scrolled() {
  const talk = $("talk");
  requestAnimationFrame(() => { following = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 80; });
}
for (const kind of ["wheel", "touchmove", "keyup", "pointerup"]) $("talk").addEventListener(kind, scrolled, {passive: true});

function edit(message) {
  const view = views.get(message), field = element("textarea"), row = element("div", "tools"), mine = message.role === "user";
  if (answers.has(chat.id) || view.box.classList.contains("editing")) return;
  field.value = message.content;
  field.setAttribute("aria-label", "Edit the message");
  const close = () => { row.remove(); field.remove(); view.box.classList.remove("editing"); };
  const take = () => {
    const text = field.value.trim();
    close();
    if (!text || text === message.content) return;
    // What was said after a message that is another now is no answer to it.
    if (mine) cut(chat.messages.indexOf(message) + 1);
    message.content = text;
    showMessage(message, true);
    if (mine) answer(chat); else save(chat);
  };
  const accept = button(mine ? "Send" : "Save", take);
  accept.className = "main";
  row.append(accept, button("Cancel", close));
  field.addEventListener("keydown", event => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing && mine) { event.preventDefault(); take(); }
    if (event.key === "Escape") { event.stopPropagation(); close(); $("text").focus(); }
  });
  view.text.after(field, row);
  view.box.classList.add("editing");
  field.style.height = Math.min(field.scrollHeight + 4, 400) + "px";
  field.focus();
}
function cut(length) {
  const one = chat, before = one.messages.map(message => ({...message})), gone = before.length - length;
  one.messages.length = length;
  showMessages();
  if (gone) notice(gone === 1 ? "The answer is replaced." : `${gone} messages are replaced.`, button("Undo", () => {
    answers.get(one.id)?.abort();
    one.messages = before;
    save(one);
    open(one);
    notice("");
  }));
}
function again(message) {
  if (answers.has(chat.id)) return;
  cut(chat.messages.indexOf(message));
  answer(chat);
}
function more(message) {
  if (answers.has(chat.id)) return;
  if (message !== chat.messages.at(-1)) cut(chat.messages.indexOf(message) + 1);
  answer(chat, message);
}

// Asking

function contentOf(message) {
  const images = message.files.filter(file => file.image), text = whole(message);
  if (!images.length) return text;
  return [...images.map(file => ({type: "image_url", image_url: {url: file.image}})), {type: "text", text}];
}
function bodyOf(one) {
  const said = one.messages.filter(m => m.role === "user" || m.content);
  const messages = said.map(m => ({role: m.role, content: m.role === "user" ? contentOf(m) : m.content}));
  if (one.system.trim()) messages.unshift({role: "system", content: one.system});
  const body = {model: $("model").value, messages, stream: true, stream_options: {include_usage: true}};
  if (one.temperature !== "") body.temperature = one.temperature;
  if (one.tokens !== "") body.max_tokens = one.tokens;
  return body;
}
// Of the conversation, or, with a message that was cut, the rest of it.
async function answer(one, message = null) {
  const body = bodyOf(one), stop = new AbortController();
  if (!message) {
    message = {role: "assistant", content: "", reasoning: "", about: "", wrong: "", cut: false, seconds: 0, files: []};
    one.messages.push(message);
    if (one === chat) $("talk").append(messageView(message));
  }
  Object.assign(message, {wrong: "", cut: true});  // until it has ended
  const run = {began: performance.now(), first: 0, pieces: 0, stalled: stalledSeconds(), kept: Date.now(), end: null};
  answers.set(one.id, stop);
  showSend();
  listChats();
  hear("Answering");
  const ticking = setInterval(() => tick(message, run), 1000);
  tick(message, run);
  down(true);
  try {
    await stream(one, message, body, stop.signal, run);
    message.cut = run.end === "length";
    message.about = figures(message, run);
  } catch (e) {
    const stopped = e.name === "AbortError";
    message.about = stopped ? "stopped" : "";
    if (!stopped) message.wrong = e.message || "The connection was lost.";
  }
  clearInterval(ticking);
  answers.delete(one.id);
  if (!message.content && !message.reasoning && !message.wrong) one.messages.splice(one.messages.indexOf(message), 1);
  finished(one, message);
}
async function stream(one, message, body, signal, run) {
  const response = await ask("v1/chat/completions", {
    method: "POST", signal, headers: {"Content-Type": "application/json"}, body: JSON.stringify(body),
  });
  if (!response.ok) throw new Error(await wrongOf(response));
  for await (const event of events(response)) {
    if (event === "[DONE]") return;
    const chunk = JSON.parse(event);
    if (chunk.error) throw new Error(chunk.error.message);
    Object.assign(run, {usage: chunk.usage || run.usage, timings: chunk.timings || run.timings});
    const choice = chunk.choices?.[0], delta = choice?.delta || {}, thinking = delta.reasoning_content || delta.reasoning;
    run.end = choice?.finish_reason || run.end;
    if (!thinking && !delta.content) continue;
    run.first = run.first || performance.now();
    run.pieces++;
    if (thinking) message.reasoning += thinking;
    if (delta.content) {
      if (message.reasoning && !message.seconds) message.seconds = (performance.now() - run.first) / 1000;
      message.content += delta.content;
    }
    draw(one, message);
    // A page that is closed in the middle of an answer finds what there was.
    if (Date.now() - run.kept > 1000 && chats.includes(one)) { run.kept = Date.now(); keep(one).catch(() => {}); }
  }
  if (!run.end) throw new Error("The server ended in the middle of the answer.");
}
// At most once in a frame, however fast tokens come.
let drawing = null;
function draw(one, message) {
  if (one !== chat || drawing) return;
  drawing = requestAnimationFrame(() => {
    drawing = null;
    if (one !== chat || !answers.has(one.id)) return;
    showMessage(message, false);
    down();
  });
}
function tick(message, run) {
  const now = performance.now(), seconds = run.first ? (now - run.first) / 1000 : 0;
  message.about = !run.first ? `reading the prompt, ${((now - run.began) / 1000).toFixed(0)} s` :
    seconds > 1 ? `${run.pieces} tokens, ${speed((run.pieces - 1) / seconds)}` : `${run.pieces} tokens`;
  const view = views.get(message);
  if (view) view.about.textContent = message.about;
}
const speed = perSecond => (perSecond < 10 ? perSecond.toFixed(2) : perSecond.toFixed(0)) + " tok/s";
function figures(message, run) {
  const first = ((run.first || performance.now()) - run.began) / 1000, tokens = run.usage?.completion_tokens ?? run.pieces;
  const said = [`${tokens} tokens`], rate = run.timings?.predicted_per_second;
  const seconds = (performance.now() - run.first) / 1000;
  if (tokens > 1 && run.first) said.push(speed(rate || (tokens - 1) / seconds));
  said.push(`first after ${first.toFixed(1)} s`);
  const stalled = stalledSeconds() - run.stalled;
  if (run.stalled !== null && stalledSeconds() !== null && stalled > 0.05) said.push(`${stalled.toFixed(1)} s of waiting for the disk`);
  if (run.timings?.cache_n) said.push(`${run.timings.cache_n} of ${run.usage.prompt_tokens} prompt tokens cached`);
  if (run.end === "length") said.push("cut at the limit");
  return said.join(" · ");
}
function finished(one, message) {
  if (one === chat) {
    if (one.messages.includes(message)) showMessage(message, true); else showMessages();
    down();
    hear(message.wrong || (message.cut ? "Stopped. " : "") + (views.get(message)?.text.textContent || ""));
  }
  showSend();
  if (chats.includes(one)) save(one);  // it may have been deleted
}
// For screen readers: the answer once, when it is complete.
function hear(text) { $("heard").textContent = text.slice(0, 5000); }

function showSend() {
  const busy = answers.has(chat.id);
  $("send").textContent = busy ? "Stop" : "Send";
  $("send").title = busy ? "Esc" : "Enter";
  $("talk").setAttribute("aria-busy", busy);
}
$("ask").addEventListener("submit", event => {
  event.preventDefault();
  if (answers.has(chat.id)) { answers.get(chat.id).abort(); return; }
  const content = $("text").value.trim();
  if (!content && !files.length) return;
  const message = {role: "user", content, files, reasoning: "", about: "", wrong: "", cut: false, seconds: 0};
  files = [];
  showFiles();
  notice("");
  $("text").value = "";
  fit();
  if (!chat.messages.length) {
    $("talk").replaceChildren();
    chat.title = chat.title || (content || message.files[0].name).split("\n")[0].slice(0, 80);
    chat.model = $("model").value;
  }
  chat.messages.push(message);
  $("talk").append(messageView(message));
  if (!chats.includes(chat)) { chats.push(chat); open(chat); }
  save(chat);
  answer(chat);
});
function fit() {
  const field = $("text");
  field.style.height = "auto";
  field.style.height = Math.min(field.scrollHeight + 2, 240) + "px";
}
$("text").addEventListener("input", fit);
$("text").addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !answers.has(chat.id)) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
  if (event.key === "ArrowUp" && !$("text").value) {
    const last = chat.messages.findLast(m => m.role === "user");
    if (last) { event.preventDefault(); edit(last); }
  }
});

// Files

function showFiles() {
  $("files").replaceChildren(...files.map(file => {
    const row = element("li", file.image ? "image" : "", file.image ? "" : file.name);
    if (file.image) row.append(picture(file));
    row.append(button("✕", () => { files = files.filter(other => other !== file); showFiles(); }, "Remove " + file.name));
    return row;
  }));
}
async function attach(list) {
  list = [...list];  // the browser empties it
  await begun;  // what the model takes is known
  const taken = served.find(one => one.name === $("model").value)?.images;
  for (const file of list) {
    if (taken && isImage(file)) {
      if (files.filter(other => other.image).length >= taken.count) { notice(`At most ${taken.count} images are taken.`); break; }
      try { files.push({name: file.name, text: "", image: await imageOf(file, taken)}); } catch (e) {
        notice(`${file.name} cannot be read as an image: ${e.message}`);
      }
      continue;
    }
    if (file.size > MOST_FILE) { notice(`${file.name} is larger than 1 MB.`); continue; }
    try {
      const text = new TextDecoder("utf-8", {fatal: true}).decode(await file.arrayBuffer());
      if (text.includes("\0")) throw new Error("not text");
      files.push({name: file.name, text});
    } catch { notice(`${file.name} is not a text file${isImage(file) ? ", and this model takes no images" : ""}.`); }
  }
  showFiles();
  $("text").focus();
}
function pick(field, take) {
  $(field).addEventListener("change", async () => { await take([...$(field).files]); $(field).value = ""; });
  return () => $(field).click();
}
$("attach").addEventListener("click", pick("file", attach));
document.addEventListener("dragover", event => event.preventDefault());
document.addEventListener("drop", event => { event.preventDefault(); attach(event.dataTransfer.files); });
$("text").addEventListener("paste", event => {
  if (event.clipboardData.files.length) { event.preventDefault(); attach(event.clipboardData.files); }
});
function download(name, text, type) {
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([text], {type}));
  link.download = (name || "conversation").replace(/[^\p{L}\p{N} ._-]+/gu, "_").slice(0, 80);
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
async function take([file]) {
  try {
    const found = fromJson(await file.text());
    if (!found.length) throw new Error("no conversations");
    for (const one of found) {
      if (chats.some(other => other.id === one.id)) one.id = newChat().id;
      await save(one);
    }
    open(found[0]);
  } catch { notice(`${file.name} holds no conversations that this page exported.`); }
}
$("import").addEventListener("click", pick("chats-file", take));
$("export-all").addEventListener("click", () => download("conversations.json", asJson(chats), "application/json"));
$("export-json").addEventListener("click", () => download(chat.title + ".json", asJson([chat]), "application/json"));
$("export-markdown").addEventListener("click", () => download(chat.title + ".md", asMarkdown(chat), "text/markdown"));

// Settings, keys and the rest of the page

function showSettings() {
  for (const field of ["system", "temperature", "tokens"]) $(field).value = chat[field];
  $("settings").showModal();
}
$("settings").addEventListener("input", () => {
  const number = field => $(field).value !== "" && $(field).validity.valid ? $(field).valueAsNumber : "";
  Object.assign(chat, {system: $("system").value, temperature: number("temperature"), tokens: number("tokens")});
});
$("settings").addEventListener("close", () => { if (chats.includes(chat)) save(chat); });
$("settings-open").addEventListener("click", showSettings);
$("help-open").addEventListener("click", () => $("help").showModal());
$("new").addEventListener("click", openNew);
$("find").addEventListener("input", listChats);
$("model").addEventListener("change", () => {
  chat.model = $("model").value;
  if (chats.includes(chat)) save(chat);
});
// What the page remembers beside conversations; not every browser lets it.
function remembered(name, value) {
  try {
    if (value !== undefined) localStorage.setItem("outcore-" + name, value);
    return localStorage.getItem("outcore-" + name);
  } catch { return null; }
}
for (const name of ["menu", "all"]) {
  $(name).addEventListener("click", () => {
    const shown = document.body.classList.toggle(name);
    $(name).setAttribute("aria-expanded", shown);
    if (name === "all") remembered(name, shown);
  });
}
document.addEventListener("keydown", event => {
  const command = (event.ctrlKey || event.metaKey) && !event.altKey, letter = event.key.toLowerCase();
  const does = command && event.shiftKey ? {o: openNew, s: showSettings}[letter] :
    command && letter === "/" ? () => $("help").showModal() : null;
  if (does && !document.querySelector("dialog[open]")) { event.preventDefault(); does(); }
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
    if (document.body.classList.contains("menu")) $("menu").click(); else answers.get(chat.id)?.abort();
  }
});
addEventListener("popstate", openByAddress);

async function listModels() {
  try {
    served = await models();
    const names = served.map(one => one.name);
    $("model").replaceChildren(...names.map(name => new Option(short(name), name)));
    $("model").disabled = names.length < 2;
    if (names.includes(chat.model)) $("model").value = chat.model;
  } catch { $("model").replaceChildren(); /* the state says that nobody answers */ }
}
async function begin() {
  watch();
  if (remembered("all") === "true" && innerWidth > 1200) $("all").click();
  try { chats = await stored(); } catch { notice("This browser keeps nothing for this page: conversations end with it."); }
  chats.sort((a, b) => b.changed - a.changed);
  const wanted = chats.find(one => one.id === location.hash.slice(1));
  open(wanted || newChat(chats[0]));
  await listModels();
}
const begun = begin();
