"use strict";
(() => {
  const $ = id => document.getElementById(id);
  const tag = (name, cls, text) => { const e = document.createElement(name); if (cls) e.className = cls; if (text !== undefined) e.textContent = text; return e; };

  // -- lines that stand for several places
  const fold = (row, open) => {
    row.setAttribute("aria-expanded", open);
    for (const m of row.parentElement.querySelectorAll("tr.member")) m.hidden = !open;
  };
  for (const row of document.querySelectorAll("tr.folds")) {
    const flip = e => { if (!e.target.closest("a")) fold(row, row.getAttribute("aria-expanded") !== "true"); };
    row.addEventListener("click", flip);
    row.addEventListener("keydown", e => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); flip(e); } });
  }

  // -- the graph: sections are made at once, their rows when they are opened
  const data = $("data") ? JSON.parse($("data").textContent) : null;
  const NAME = 0, TEXT = 1, INPUTS = 2, VALUE = 3, FQN = 4, WHERE = 5, FUSED = 6;
  const word = i => data.words[i];
  const now = { graph: 0, stage: "after" };
  const rowsOf = () => data.graphs[now.graph].stages[now.stage].rows;

  const line = (rows, i, stage = now.stage) => {
    const r = rows[i], e = tag("div", "row" + (r[FUSED] ? " fused" : ""));
    e.title = [word(r[FQN]) || "(root)", word(r[WHERE])].filter(Boolean).join("\n");
    e.dataset.name = r[NAME];
    e.append(tag("span", "at", [word(r[FQN]), word(r[WHERE]).split("/").pop()].filter(Boolean).join("  ")));
    e.append(tag("b", "", r[NAME]), " = ");
    const parts = word(r[TEXT]).split(/%(\d+)/);
    parts.forEach((part, k) => {
      if (k % 2 === 0) { e.append(part); return; }
      const a = tag("a", "", rows[r[INPUTS][+part]][NAME]);
      a.href = `#node/${now.graph}/${stage}/${a.textContent}`;
      e.append(a);
    });
    e.append("  ", tag("i", "", word(r[VALUE])));
    return e;
  };

  const fill = (section, start) => {
    const box = section.querySelector(".rows");
    if (box.dataset.start === String(start)) return;
    box.dataset.start = start;
    const rows = rowsOf(), part = document.createDocumentFragment();
    for (let i = start; i < start + +section.dataset.size; i++) part.append(line(rows, i));
    box.replaceChildren(part);
  };

  const draw = () => {
    const box = document.createDocumentFragment();
    for (const [title, start, size, same] of data.graphs[now.graph].stages[now.stage].sections) {
      const d = tag("details"), s = tag("summary");
      d.dataset.size = size;
      d.dataset.starts = JSON.stringify([start, ...same.map(x => x[1])]);
      s.append(tag("span", "count", same.length ? `${same.length + 1}×` : ""), tag("span", "fqn", title), " ", tag("span", "muted", `${size} node${size > 1 ? "s" : ""}`));
      if (same.length) {
        const pick = tag("select");
        pick.setAttribute("aria-label", "block");
        for (const [name, at] of [["", start], ...same]) { const o = tag("option", "", name); o.value = at; pick.append(o); }
        pick.options[0].textContent = data.graphs[now.graph].stages[now.stage].first[start];
        pick.addEventListener("change", () => { d.open = true; fill(d, +pick.value); });
        pick.addEventListener("click", e => e.stopPropagation());
        s.append("  ", pick);
      }
      d.append(s, tag("div", "rows"));
      d.addEventListener("toggle", () => { if (d.open) fill(d, +(d.querySelector("select")?.value ?? start)); });
      box.append(d);
    }
    $("nodes").replaceChildren(box);
    const ended = data.graphs[now.graph].ended;
    $("ended").textContent = ended ? `ended by: ${ended}` : "";
  };

  const show = (graph, stage) => {
    if (graph === now.graph && stage === now.stage && $("nodes").childElementCount) return;
    now.graph = graph; now.stage = stage;
    const g = data.graphs[graph];
    $("which").value = graph;
    $("stage").replaceChildren(...Object.keys(g.stages).map(k => { const o = tag("option", "", k); o.value = k; return o; }));
    $("stage").value = stage;
    draw();
  };

  const goTo = (graph, stage, name) => {
    const g = data.graphs[graph];
    if (!g) return;
    const real = g.stages[stage] ? stage : Object.keys(g.stages).pop();
    show(graph, real);
    const at = rowsOf().findIndex(r => r[NAME] === name || r[NAME].endsWith("/" + name));
    if (at < 0) return;
    for (const d of $("nodes").children) {
      const start = JSON.parse(d.dataset.starts).find(s => at >= s && at < s + +d.dataset.size);
      if (start === undefined) continue;
      const pick = d.querySelector("select");
      if (pick) pick.value = start;
      d.open = true;
      fill(d, start);
      for (const old of document.querySelectorAll(".row.lit")) old.classList.remove("lit");
      const row = d.querySelector(".rows").children[at - start];
      row.classList.add("lit");
      row.scrollIntoView({ block: "center" });
      return;
    }
  };

  const follow = () => {
    const hash = decodeURIComponent(location.hash.slice(1));
    if (hash.startsWith("kernel/")) { const d = $(hash); if (d) { d.open = true; d.scrollIntoView(); } }
    if (hash.startsWith("node/") && data) { const [, g, stage, ...rest] = hash.split("/"); goTo(+g, stage, rest.join("/")); }
  };
  addEventListener("hashchange", follow);
  document.addEventListener("click", e => { const a = e.target.closest("a"); if (a && a.hash === location.hash) follow(); });

  if (data) {
    $("which").replaceChildren(...data.graphs.map((g, i) => { const o = tag("option", "", `${i}: ${g.name}`); o.value = i; return o; }));
    $("which").addEventListener("change", () => show(+$("which").value, Object.keys(data.graphs[+$("which").value].stages).pop()));
    $("stage").addEventListener("change", () => show(now.graph, $("stage").value));
    $("open").addEventListener("click", () => { for (const d of $("nodes").children) d.open = true; });
    $("close").addEventListener("click", () => { for (const d of $("nodes").children) d.open = false; });
    show(0, Object.keys(data.graphs[0].stages).pop());
  }

  // -- search: tables are filtered, nodes are listed
  const MOST = 100;
  const texts = new Map();
  const textOf = e => { if (!texts.has(e)) texts.set(e, e.textContent.toLowerCase()); return texts.get(e); };
  const search = () => {
    const q = $("search").value.trim().toLowerCase();
    let places = 0, nodes = 0;
    for (const e of document.querySelectorAll("[data-search]")) {
      const hit = !q || textOf(e).includes(q);
      e.hidden = !hit;
      const head = e.querySelector("tr.head");
      if (!head) { places += hit && q ? 1 : 0; continue; }
      const members = [...e.querySelectorAll("tr.member")];
      const mine = q ? members.filter(m => textOf(m).includes(q)) : [];
      const some = mine.length && mine.length < members.length;
      if (members.length) { fold(head, false); if (some) { head.setAttribute("aria-expanded", true); for (const m of mine) m.hidden = false; } }
      places += hit && q ? (mine.length || members.length || 1) : 0;
    }
    if (data) {
      const out = document.createDocumentFragment();
      const stages = data.graphs[now.graph].stages, shown = new Set();
      // a node that a pass replaced is only in an earlier stage, so all are searched, the last one first
      if (q) for (const stage of Object.keys(stages).reverse()) stages[stage].rows.forEach((r, i) => {
        if (shown.has(r[NAME]) || ![r[NAME], word(r[TEXT]), word(r[FQN]), word(r[WHERE]), word(r[VALUE])].some(t => t.toLowerCase().includes(q))) return;
        shown.add(r[NAME]);
        if (nodes++ >= MOST) return;
        const e = line(stages[stage].rows, i, stage), b = e.querySelector("b"), a = tag("a", "", r[NAME]);
        a.href = `#node/${now.graph}/${stage}/${r[NAME]}`;
        b.replaceChildren(a);
        e.prepend(tag("span", "stage", stage));
        out.append(e);
      });
      if (nodes > MOST) out.append(tag("p", "muted", `.. and ${nodes - MOST} more`));
      $("found").replaceChildren(out);
    }
    $("hits").textContent = q ? `${places} place${places === 1 ? "" : "s"}` + (data ? `, ${nodes} node${nodes === 1 ? "" : "s"} of this graph` : "") : "";
  };
  let waiting;
  $("search").addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(search, 120); });
  addEventListener("keydown", e => {
    if (e.key === "/" && e.target !== $("search")) { e.preventDefault(); $("search").focus(); }
    if (e.key === "Escape" && e.target === $("search")) { $("search").value = ""; search(); }
  });
  follow();
})();
