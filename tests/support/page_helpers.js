// What tests/test_web_page.py does and asks in the page.
window.pwned = () => { window.ran = true; };
addEventListener("securitypolicyviolation", () => window.pwned());

window.t = {
  set(id, value, event) {
    document.getElementById(id).value = value;
    if (event) document.getElementById(id).dispatchEvent(new Event(event, {bubbles: true}));
  },
  click(selector) { document.querySelector(selector).click(); },
  // The last button of these words.
  press(words, within) {
    [...document.querySelectorAll(within + " button")].filter(e => e.textContent === words).at(-1).click();
  },
  give(id, files) {
    const held = new DataTransfer(), field = document.getElementById(id);
    for (const [name, content] of files) {
      held.items.add(new File([typeof content === "string" ? content : new Uint8Array(content)], name));
    }
    field.files = held.files;
    field.dispatchEvent(new Event("change"));
  },
  // A file that is pasted, or dragged into the window.
  hand(kind, name, content) {
    const held = new DataTransfer(), file = new File([new Uint8Array(content)], name, {type: "image/png"});
    held.items.add(file);
    const text = document.getElementById("text"), given = {bubbles: true, cancelable: true};
    text.dispatchEvent(kind === "paste" ? new ClipboardEvent("paste", {clipboardData: held, ...given}) :
      new DragEvent("drop", {dataTransfer: held, ...given}));
  },
  // Downloads go to window.saved.
  catchDownloads() {
    URL.createObjectURL = blob => { blob.text().then(text => { window.saved = text; }); return "blob:none"; };
    HTMLAnchorElement.prototype.click = () => {};
  },
  // A conversation that another tab has changed.
  async change(chat) {
    const {keep} = await import("/page/store.js");
    await keep(chat);
    new BroadcastChannel("outcore").postMessage(chat.id);
  },
  // The only conversation, which another tab deletes.
  async remove() {
    const {forget, stored} = await import("/page/store.js");
    const [{id}] = await stored();
    await forget(id);
    new BroadcastChannel("outcore").postMessage({gone: id});
  },
  async stored() { return (await (await import("/page/store.js")).stored()).length; },
  // Elements and attributes that could do something, in what is said, listed, chosen or told.
  harmful() {
    const tags = new Set(("a article blockquote br button code details div em footer h1 h2 h3 hr input li ol option p pre s " +
      "select span strong summary table tbody td textarea th thead tr ul").split(" "));
    const found = [];
    for (const e of document.querySelectorAll("#talk *, #chats *, #model *, #notice *")) {
      if (!tags.has(e.localName)) found.push(e.localName);
      for (const a of e.attributes) {
        if (/^on|^style$|^src|action|^id$|^name$/.test(a.name)) found.push(`${e.localName} ${a.name}`);
        if (a.name === "href" && !/^(https?:|mailto:|#[\w-]+$)/.test(a.value)) found.push(a.value);
      }
    }
    return found;
  },
  // Is a growing answer, shown at every step of so many letters, in the end what it is as a whole?
  async grown(text, step) {
    const {Rendered} = await import("/page/markdown.js");
    const grows = new Rendered(document.createElement("div")), whole = new Rendered(document.createElement("div"));
    for (let n = 0; n < text.length; n += step) grows.show(text.slice(0, n), false);
    grows.show(text, false);
    const before = grows.element.textContent;
    grows.show(text, true);
    whole.show(text, true);
    return grows.element.innerHTML === whole.element.innerHTML && before === whole.element.textContent;
  },
  // Counts the frames in which what is said changed.
  countFrames() {
    const plain = requestAnimationFrame, changes = new MutationObserver(() => {});
    changes.observe(document.getElementById("talk"), {childList: true, characterData: true, subtree: true});
    window.drawn = 0;
    window.requestAnimationFrame = draw => plain(at => {
      changes.takeRecords();
      draw(at);
      if (changes.takeRecords().length) window.drawn++;
    });
  },
  // What stands out of the window on the right.
  outside() {
    return [...document.querySelectorAll("header *, main button, main textarea, .said, .open")]
      .filter(e => e.checkVisibility() && e.getBoundingClientRect().right > innerWidth + 0.5).map(e => e.outerHTML);
  },
  // Text with less contrast than WCAG's 4.5.
  faint() {
    const light = colour => {
      const [r, g, b] = colour.match(/[\d.]+/g).map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
      return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const behind = e => {
      const colour = getComputedStyle(e).backgroundColor;
      return colour.endsWith(", 0)") ? behind(e.parentElement) : colour;
    };
    return [...document.querySelectorAll("main *, header *, nav *")]
      .filter(e => e.checkVisibility() && !e.children.length && e.textContent.trim()).map(e => {
        const [a, b] = [light(getComputedStyle(e).color), light(behind(e))].sort((a, b) => b - a);
        return [(a + 0.05) / (b + 0.05), e.outerHTML.slice(0, 80)];
      }).filter(([ratio]) => ratio < 4.5);
  },
};
