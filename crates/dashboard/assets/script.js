// Keeps the page up to date and adds shortcuts. Every page works without it.
"use strict";
(() => {
  const root = document.documentElement;
  const base = root.dataset.base;
  // Shows the elements that need this script, also in pages that the server sends later.
  root.classList.add("has-script");
  const spanish = root.lang === "es";
  const main = document.getElementById("main");

  // Times: ages count up, and everything else is shown in the zone of the browser.
  // Each unit, with the next smaller unit and the duration from which the smaller unit is left out.
  const units = [[86400000, "d", 3600000, "h", 864000000], [3600000, "h", 60000, "min", 86400000], [60000, "min", 1000, "s", 600000]];
  const decimal = (n) => n.toFixed(1).replace(/\.0$/, "").replace(".", spanish ? "," : ".");
  const duration = (ms) => {
    for (const [size, name, small, smallName, until] of units) {
      if (ms < size) continue;
      const rest = ms < until ? Math.floor((ms % size) / small) : 0;
      return `${Math.floor(ms / size)} ${name}${rest ? ` ${rest} ${smallName}` : ""}`;
    }
    if (ms >= 10000) return `${Math.floor(ms / 1000)} s`;
    return ms >= 1000 ? `${decimal(ms / 1000)} s` : `${Math.max(0, Math.floor(ms))} ms`;
  };
  const until = (ms) => (ms < 1000 ? (spanish ? "ahora" : "now") : duration(ms));
  const relative = (ms) => {
    const text = duration(Math.abs(ms));
    if (Math.abs(ms) < 1000) return until(0);
    if (spanish) return ms >= 0 ? `dentro de ${text}` : `hace ${text}`;
    return ms >= 0 ? `in ${text}` : `${text} ago`;
  };
  const two = (n) => String(n).padStart(2, "0");
  const clock = (d) => `${two(d.getHours())}:${two(d.getMinutes())}:${two(d.getSeconds())}.${String(d.getMilliseconds()).padStart(3, "0")}`;
  const moment = (d) => `${d.getFullYear()}-${two(d.getMonth() + 1)}-${two(d.getDate())} ${clock(d).slice(0, 8)}`;
  const instant = (d) => `${d.toDateString() === new Date().toDateString() ? "" : `${moment(d).slice(0, 10)} `}${clock(d).slice(0, 8)}`;
  const showTimes = (within) => {
    for (const element of within.querySelectorAll("time[data-as]")) {
      const at = new Date(element.dateTime);
      if (Number.isNaN(at.getTime())) continue;
      const kind = element.dataset.as;
      const text = kind === "age" ? duration(Date.now() - at) : kind === "until" ? until(at - Date.now()) : kind === "relative" ? relative(at - Date.now()) : kind === "clock" ? clock(at) : kind === "instant" ? instant(at) : moment(at);
      if (element.textContent !== text) element.textContent = text;
      if (!element.dataset.local) {
        element.dataset.local = "1";
        element.title = `${at.toLocaleString(root.lang, { dateStyle: "medium", timeStyle: "long" })}\n${element.title}`;
      }
    }
    for (const label of within.querySelectorAll(".chart text[data-at]")) {
      const at = new Date(label.dataset.at);
      const day = label.dataset.as === "day" ? `${at.toLocaleDateString(root.lang, { weekday: "short" })} ` : "";
      label.textContent = `${day}${clock(at).slice(0, 5)}`;
    }
    for (const zone of within.querySelectorAll("[data-zone]")) zone.textContent = Intl.DateTimeFormat().resolvedOptions().timeZone;
  };

  // Live: the server sends the page again when it has changed. What is being typed, selected or read stays as it is.
  const isBusy = () => {
    const active = document.activeElement;
    const isTyping = active && main.contains(active) && active.matches("input:not([type=checkbox]), select, textarea");
    const selection = getSelection();
    return isTyping || main.querySelector("dialog[open]") || (selection && !selection.isCollapsed && main.contains(selection.anchorNode));
  };
  const keyOf = (row) => row.dataset.key;
  // New rows of a list are held back behind a button with their number, so that they do not move what is being read. Known rows change in
  // place.
  let newest = null;
  const hold = (next, html) => {
    const [list, nextList] = [main, next.content].map((part) => part.querySelector("[data-hold]"));
    const [body, nextBody] = [list, nextList].map((part) => part && part.querySelector("tbody"));
    if (!body || !nextBody) return;
    const known = [...body.querySelectorAll("tr[data-key]")];
    const arrived = new Map([...nextBody.querySelectorAll("tr[data-key]")].map((row) => [keyOf(row), row]));
    const fresh = [...arrived.keys()].filter((key) => !known.some((row) => keyOf(row) === key)).length;
    if (!fresh) return;
    nextBody.replaceChildren(...known.map((row) => arrived.get(keyOf(row)) || row.cloneNode(true)));
    const line = document.createElement("div");
    line.className = "fresh";
    line.setAttribute("role", "status");
    const button = document.createElement("button");
    button.textContent = `${fresh} ${nextList.dataset.hold}`;
    line.append(button);
    nextBody.closest(".scroll").before(line);
    newest = html;
  };
  // Unsaved edits of a form stay when the server sends the page again.
  const formFields = () => [...main.querySelectorAll("form :is(input:not([type=hidden]), select, textarea)")];
  const fieldKey = (field) => `${field.form.getAttribute("action")} ${field.name} ${field.type === "checkbox" ? field.value : ""}`;
  const isEdited = (field) => {
    if (field.type === "checkbox") return field.checked !== field.defaultChecked;
    if (field.options) return [...field.options].some((option) => option.selected !== option.defaultSelected);
    return field.value !== field.defaultValue;
  };
  // The focus stays when its element is replaced by a new one. Elements that look the same are told apart by their order.
  const rememberFocus = (part) => {
    const active = document.activeElement;
    if (!part || active === part || !part.contains(active)) return () => {};
    const nameOf = (element) => JSON.stringify([element.tagName, element.id, ...["href", "name", "value", "formaction", "data-key-action"].map((name) => element.getAttribute(name))]);
    const alike = (name) => [...part.querySelectorAll(active.tagName)].filter((element) => nameOf(element) === name);
    const name = nameOf(active);
    const index = alike(name).indexOf(active);
    return () => {
      const elements = alike(name);
      const element = elements[index] || elements[0] || main;
      element.focus({ preventScroll: true });
    };
  };
  const swap = (html, isAsked) => {
    const next = document.createElement("template");
    next.innerHTML = html;
    newest = null;
    if (!isAsked) hold(next, html);
    const rows = new Map([...main.querySelectorAll("tr[data-key]")].map((row) => [keyOf(row), row.innerHTML]));
    const open = new Set([...main.querySelectorAll("details[open][id]")].map((element) => element.id));
    const edited = new Map(formFields().filter(isEdited).map((field) => [fieldKey(field), field]));
    const checked = new Set([...main.querySelectorAll("table input[type=checkbox]:checked")].map((box) => box.value));
    const restoreFocus = rememberFocus(main);
    const changed = [...next.content.querySelectorAll("tr[data-key]")].filter((row) => rows.has(keyOf(row)) && rows.get(keyOf(row)) !== row.innerHTML).map(keyOf);
    const selected = main.querySelector("tr.selected");
    const selectedKey = selected && keyOf(selected);
    const scrolled = [...main.querySelectorAll("[data-center]")].map((box) => [box.id, box.scrollLeft, box.scrollTop]);
    // The result of an action stays until the viewer leaves the page. The server sends it once.
    const notice = main.querySelector(":scope > .notice");
    main.replaceChildren(...(notice ? [notice] : []), ...next.content.childNodes);
    for (const row of main.querySelectorAll("tr[data-key]")) {
      if (changed.includes(keyOf(row))) row.classList.add("changed");
      if (selectedKey && keyOf(row) === selectedKey) row.classList.add("selected");
    }
    for (const id of open) { const element = document.getElementById(id); if (element) element.open = true; }
    for (const box of main.querySelectorAll("table input[type=checkbox]")) box.checked = checked.has(box.value);
    for (const field of formFields()) {
      const old = edited.get(fieldKey(field));
      if (old) { if (field.type === "checkbox") field.checked = old.checked; else field.value = old.value; }
    }
    for (const [id, left, top] of scrolled) { const box = document.getElementById(id); if (box) box.scrollTo(left, top); }
    restoreFocus();
    showTimes(main);
    countSelected();
  };
  let waiting = null;
  const show = () => { if (waiting && !isBusy()) { const html = waiting; waiting = null; swap(html); } };
  // A browser opens few connections to one server, so only the page in front keeps one: not a hidden tab, nor a page that was left and
  // that the browser keeps for "back".
  let source = null;
  const here = () => encodeURIComponent(location.pathname.slice(base.length) + location.search);
  const unwatch = () => {
    if (source) source.close();
    source = null;
    root.classList.remove("is-live");
  };
  const watch = () => {
    if (source || !main || root.dataset.live !== "1" || document.hidden) return;
    source = new EventSource(`${base}/live?path=${here()}`);
    source.addEventListener("open", () => root.classList.add("is-live"));
    source.addEventListener("error", () => root.classList.remove("is-live"));
    source.addEventListener("login", () => location.assign(`${base}/login?next=${here()}`));
    source.addEventListener("page", (event) => {
      const page = JSON.parse(event.data);
      const navigation = document.getElementById("navigation");
      if (navigation && page.navigation) {
        const restoreFocus = rememberFocus(navigation);
        navigation.innerHTML = page.navigation;
        restoreFocus();
      }
      waiting = page.main;
      show();
    });
  };
  addEventListener("pagehide", unwatch);
  addEventListener("pageshow", watch);
  document.addEventListener("visibilitychange", () => { if (document.hidden) unwatch(); else watch(); });

  // The selection of jobs for bulk actions.
  const countSelected = () => {
    const boxes = [...document.querySelectorAll("tbody input[name=id]:checked")];
    for (const element of document.querySelectorAll("[data-selected]")) element.textContent = String(boxes.length);
    for (const button of document.querySelectorAll("[data-needs-selection]")) button.disabled = boxes.length === 0;
  };

  // Keyboard.
  const rows = () => [...main.querySelectorAll("tbody tr[data-key]")];
  const select = (step) => {
    const all = rows();
    if (!all.length) return;
    const current = all.findIndex((row) => row.classList.contains("selected"));
    const next = all[Math.min(all.length - 1, Math.max(0, current + step))];
    for (const row of all) row.classList.remove("selected");
    next.classList.add("selected");
    next.scrollIntoView({ block: "nearest" });
  };
  const inRow = (selector) => { const row = main.querySelector("tr.selected"); return row && row.querySelector(selector); };
  const act = (name) => { const control = document.querySelector(`[data-key-action=${name}]`); if (control && !control.disabled) control.click(); };
  const keys = {
    "/": () => { const input = document.querySelector("input[name=q]"); if (input) input.focus(); },
    j: () => select(1),
    k: () => select(-1),
    x: () => { const box = inRow("input[type=checkbox]"); if (box) { box.checked = !box.checked; countSelected(); } },
    Enter: () => { const link = inRow("a[href]"); if (link) link.click(); },
    r: () => act("retry"),
    e: () => act("edit"),
    a: () => act("again"),
    "?": () => { const help = document.getElementById("keys"); if (help) help.open = !help.open; },
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.matches("input:not([type=checkbox]), select, textarea")) { if (event.key === "Escape") event.target.blur(); return; }
    if (event.key === "Enter" && event.target.matches("a, button, summary")) return;
    const action = keys[event.key];
    if (action) { event.preventDefault(); action(); }
  });
  document.addEventListener("change", (event) => {
    if (event.target.matches("[data-select-all]")) for (const box of main.querySelectorAll("tbody input[name=id]")) box.checked = event.target.checked;
    countSelected();
  });
  // While you type the timing of a schedule, its editor explains when the schedule runs.
  let explaining = 0;
  document.addEventListener("input", (event) => {
    if (!event.target.matches("[data-timing]")) return;
    const form = event.target.form;
    const number = ++explaining;
    const query = new URLSearchParams([...form.querySelectorAll("[data-timing]")].map((field) => [field.name, field.value]));
    fetch(`${form.dataset.explain}?${query}`).then((answer) => answer.text()).then((html) => {
      if (number === explaining) document.getElementById("explained").innerHTML = html;
    });
  });
  document.addEventListener("click", (event) => {
    const copy = event.target.closest("[data-copy]");
    if (copy) {
      const source = document.getElementById(copy.dataset.copy);
      const done = () => { copy.textContent = copy.dataset.copied; };
      if (navigator.clipboard) navigator.clipboard.writeText(source.textContent).then(done, () => {});
      // Without HTTPS there is no clipboard API, so the text is selected and copied.
      else { getSelection().selectAllChildren(source); if (document.execCommand("copy")) done(); }
      return;
    }
    if (newest && event.target.closest(".fresh")) { swap(newest, true); return; }
    const row = event.target.closest("tr[data-key]");
    if (row && !event.target.closest("a, button, input, label, summary") && getSelection().isCollapsed) { const link = row.querySelector("a[href]"); if (link) link.click(); }
  });
  document.addEventListener("submit", (event) => {
    const question = event.submitter && event.submitter.dataset.confirm;
    if (question && !confirm(question)) event.preventDefault();
  });

  // A diagram that scrolls starts with the element in its centre that the page is about.
  for (const box of document.querySelectorAll("[data-center]")) {
    const middle = box.querySelector(box.dataset.center);
    if (!middle) continue;
    const [inner, outer] = [middle.getBoundingClientRect(), box.getBoundingClientRect()];
    box.scrollTo(inner.left + inner.width / 2 - outer.left - outer.width / 2, inner.top + inner.height / 2 - outer.top - outer.height / 2);
  }

  // On a narrow screen the navigation is a row that scrolls. The current page must be visible.
  const bar = document.getElementById("navigation");
  const current = bar && bar.querySelector("a[aria-current]");
  if (current) {
    const [inner, outer] = [current.getBoundingClientRect(), bar.getBoundingClientRect()];
    if (inner.right > outer.right) bar.scrollLeft = inner.left - outer.left - 48;
  }
  showTimes(document);
  countSelected();
  setInterval(() => { showTimes(document); show(); }, 1000);
  watch();
})();
