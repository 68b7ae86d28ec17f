// What the server does, live.
import {ask, events, loads, short} from "./server.js";

const $ = id => document.getElementById(id);
const sleep = ms => new Promise(done => setTimeout(done, ms));

const CODES = {m: "in memory", c: "computing", r: "ready", l: "loading", d: "on disk"};
const PARTS = {weights: "m", slots: "l", experts: "l", caches: "r", activations: "c", allocator: "reuse"};
const size = n => {
  for (const unit of ["B", "KB", "MB", "GB", "TB"]) {
    if (n < 1000 || unit === "TB") return (unit === "B" || n >= 100 ? n.toFixed(0) : n.toPrecision(3)) + " " + unit;
    n /= 1000;
  }
};
const number = (n, digits) => n === null || n === undefined ? "–" : n.toFixed(digits);
const put = (id, text) => { const e = $(id); if (e.textContent !== text) e.textContent = text; };
const wide = (id, share) => { $(id).style.width = Math.max(0, Math.min(1, share || 0)) * 100 + "%"; };
function children(id, tag, count) {
  const e = $(id);
  while (e.children.length > count) e.lastChild.remove();
  while (e.children.length < count) e.append(document.createElement(tag));
  return e.children;
}
function items(id, said) {
  const list = children(id, "li", said.length);
  said.forEach(([code, text], i) => {
    if (!list[i].firstChild) list[i].append(document.createElement("b"), "");
    list[i].firstChild.className = code;
    if (list[i].lastChild.data !== text) list[i].lastChild.data = text;
  });
}
function state(text, kind = "") { const e = $("state"); put("state", text); if (e.className !== kind) e.className = kind; }
// Seconds that the model in memory has waited for the disk until now; null where it is not known.
let stalled = null;
export const stalledSeconds = () => stalled;
// Without a model, health says whether one is being loaded; it is asked once a second.
let watched = "", told = 0;
async function tellLoading() {
  if (performance.now() - told < 1000) return;
  told = performance.now();
  const loading = await loads().catch(() => false);
  if (!watched) state(loading ? "loading the model" : "no model in memory");
}
function show(snapshot) {
  const model = snapshot.models[0];
  watched = model ? model.name : "";
  stalled = model && model.disk.how !== "none" ? model.disk.stall_s : null;
  if (!model) {
    tellLoading();
    put("name", "Layers"); children("strip", "i", 0); items("legend", []);
    for (const id of ["per-s", "per-sweep", "rate"]) put(id, "–");
    return;
  }
  told = 0;
  state(model.state, model.state);
  put("name", short(model.name));
  const codes = model.layers + model.head, strip = children("strip", "i", codes.length);
  for (let i = 0; i < codes.length; i++) {
    const now = codes[i] + (i >= model.layers.length ? " head" : "");
    if (strip[i].className !== now) strip[i].className = now;
  }
  const count = code => model.layers.split(code).length - 1;
  const there = Object.keys(CODES).filter(code => "md".includes(code) || count(code));
  const legend = there.map(code => [code, count(code) + " " + CODES[code]]);
  if (model.shed_layers) legend.push(["c", model.shed_layers + " shed"]);
  items("legend", legend);
  $("strip").setAttribute("aria-label", legend.map(([, text]) => text).join(", "));

  const tokens = model.tokens, disk = model.disk, memory = model.memory, drafts = model.drafts;
  put("per-s", number(tokens.per_s || null, tokens.per_s < 10 ? 2 : 1));
  put("per-sweep", number(tokens.per_sweep, 2));
  put("rate", number(disk.gbps, 2));
  // Of a model that is all in memory neither passes nor readings are counted.
  const streams = disk.how !== "none";
  for (const e of document.querySelectorAll("#server .streams")) e.hidden = !streams;

  put("held", size(memory.active + memory.kept) + " of " + size(memory.budget));
  wide("active", memory.active / memory.budget); wide("kept", memory.kept / memory.budget);
  put("planned", size(memory.planned) + " of " + size(memory.budget));
  const parts = Object.entries(PARTS).filter(([part]) => memory[part] > 0), bars = children("plan", "b", parts.length);
  parts.forEach(([part, code], i) => {
    bars[i].className = code;
    bars[i].style.width = 100 * memory[part] / Math.max(memory.budget, memory.planned) + "%";
  });
  items("parts", parts.map(([part, code]) => [code, (part === "allocator" ? "reuse" : part) + " " + size(memory[part])]));

  $("disk").hidden = !streams;
  put("ssd", number(disk.gbps, 2) + (disk.ceiling_gbps ? " of " + disk.ceiling_gbps.toFixed(2) : "") + " GB/s");
  $("ssd-bar").parentNode.hidden = !disk.ceiling_gbps;
  wide("ssd-bar", disk.gbps / disk.ceiling_gbps);
  put("stalled", Math.round(100 * (disk.stalled || 0)) + " %, " + disk.stall_s.toFixed(1) + " s in all");
  wide("stalled-bar", disk.stalled);
  put("slots", size(disk.bytes) + " read, " + disk.how + ", through " + model.slots + " slots");

  put("steps", streams ? "Passes and drafts" : "Tokens and drafts");
  put("made-of", streams ? "tokens, passes" : "tokens");
  put("made", tokens.made + (streams ? ", " + tokens.sweeps : ""));
  put("sweeps-per-s", number(tokens.sweeps_per_s, 2));
  put("drafts-of", drafts.source ? "drafts (" + drafts.source + ")" : "drafts");
  put("drafts", drafts.source ? drafts.accepted + " of " + drafts.drafted + " right" : "none");
  $("drafts-row").hidden = !drafts.drafted;
  wide("drafts-bar", drafts.accepted / drafts.drafted);

  $("noted").hidden = !model.notes.length;
  const notes = children("notes", "li", model.notes.length);
  model.notes.slice().reverse().forEach((note, i) => { if (notes[i].textContent !== note) notes[i].textContent = note; });
}
let stop = null;
export async function watch() {
  for (;;) {
    // Nobody is watched by a page that nobody sees.
    while (document.hidden) await sleep(500);
    try {
      stop = new AbortController();
      const response = await ask("monitor/events", {signal: stop.signal});
      if (!response.ok) throw new Error(response.statusText);
      for await (const event of events(response)) show(JSON.parse(event));
    } catch { /* told below */ }
    if (!document.hidden) { state("not connected", "away"); await sleep(2000); }
  }
}
document.addEventListener("visibilitychange", () => { if (document.hidden && stop) stop.abort(); });
