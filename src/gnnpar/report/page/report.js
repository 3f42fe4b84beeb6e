"use strict";
(() => {
  const root = document.documentElement;
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const baseline = document.getElementById("baseline");
  const search = document.getElementById("search");
  const filters = all("[data-filter]"), heads = all("[data-sort]"), details = all("details");
  const rows = all("#table tbody tr"), body = document.querySelector("#table tbody");
  const first = baseline ? baseline.value : "";
  let sorted = { column: "", up: true };

  // light, dark: the choice stays where the browser keeps any for files
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const button = document.getElementById("theme");
  const current = () => root.dataset.theme || (dark.matches ? "dark" : "light");
  function theme(name, keep) {
    if (name) root.dataset.theme = name; else delete root.dataset.theme;
    button.textContent = current() === "dark" ? "light" : "dark";
    button.setAttribute("aria-label", `switch to ${button.textContent}`);
    try { if (keep) localStorage.setItem("gnnpar-theme", name); } catch { /* no storage here */ }
  }
  button.addEventListener("click", () => theme(current() === "dark" ? "light" : "dark", true));
  dark.addEventListener("change", () => theme(root.dataset.theme, false));
  let before = null;
  window.addEventListener("beforeprint", () => {  // on paper all is unfolded and light
    before = [root.dataset.theme || "", details.filter((each) => each.open)];
    details.forEach((each) => { each.open = true; });
    theme("light", false);
  });
  window.addEventListener("afterprint", () => {
    details.forEach((each) => { each.open = before[1].includes(each); });
    theme(before[0], false);
  });

  // the filters hold for runs and, by model and dataset, for pictures; the address says what they are set to
  const chosen = (name) => filters.find((f) => f.dataset.filter === name).value;
  const passes = (data, names) => names.every((name) => !chosen(name) || data[name] === chosen(name));
  function filter() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of rows) {
      const text = Object.values(row.dataset).join(" ").toLowerCase();
      row.hidden = !passes(row.dataset, ["strategy", "model", "dataset"]) || !words.every((w) => text.includes(w));
    }
    const shown = rows.filter((row) => !row.hidden).length;
    document.getElementById("count").textContent =
      shown === rows.length ? `${rows.length} runs` : `${shown} of ${rows.length} runs`;
    all("figure[data-model]").forEach((f) => { f.hidden = !passes(f.dataset, ["model", "dataset"]); });
    all(".curves").forEach(emphasise);
    all("#speed-up figure").forEach((figure) => {
      const plots = all(".plot", figure);
      plots.forEach((plot) => { plot.hidden = plot.dataset.base !== baseline.value; });
      figure.querySelector(".none").hidden = plots.some((plot) => !plot.hidden);
    });
  }

  // the strategy of the filter is in colour, and all else grey
  function emphasise(picture) {
    const lines = all("[data-strategy]", picture), wanted = chosen("strategy");
    const any = wanted && lines.some((line) => line.dataset.strategy === wanted);
    for (const line of lines) {
      const its = any && line.dataset.strategy === wanted;
      line.classList.toggle("wanted", its);
      line.classList.toggle("unwanted", any && !its);
      if (line.matches(".label, .leader")) line.toggleAttribute("hidden", any ? !its : !("shown" in line.dataset));
    }
  }

  // sorting is by the exact values; what is missing goes last, either way
  function sort(column, up) {
    const head = heads.find((h) => h.dataset.sort === column);
    if (!head) return;
    sorted = { column, up };
    heads.forEach((h) => h.closest("th").removeAttribute("aria-sort"));
    head.closest("th").setAttribute("aria-sort", up ? "ascending" : "descending");
    const key = column.replace(/_(.)/g, (_, letter) => letter.toUpperCase()), text = "text" in head.dataset;
    const compare = (a, b) => {
      const [x, y] = [a.dataset[key], b.dataset[key]];
      if (x === "" || y === "") return (x === "") - (y === "");
      return (text ? x.localeCompare(y) : Number(x) - Number(y)) * (up ? 1 : -1);
    };
    [...rows].sort(compare).forEach((row) => body.append(row));
  }

  // a link to the page as it is: only what differs from the page as it opens
  function address() {
    const state = new URLSearchParams();
    filters.filter((f) => f.value).forEach((f) => state.set(f.dataset.filter, f.value));
    if (search.value) state.set("search", search.value);
    if (baseline && baseline.value !== first) state.set("baseline", baseline.value);
    if (sorted.column) state.set("sort", (sorted.up ? "" : "-") + sorted.column);
    document.getElementById("link").href = `#${state}`;
    if (location.hash.includes("=") || `${state}`) history.replaceState(null, "", `#${state}`);
  }
  function restore() {
    if (location.hash && !location.hash.includes("=")) {  // a place on the page
      const place = document.getElementById(location.hash.slice(1));
      if (place && place.closest("details")) place.closest("details").open = true;
      return;
    }
    const state = new URLSearchParams(location.hash.slice(1));
    const set = (select, value) => {
      select.value = value;
      if (select.selectedIndex < 0) select.selectedIndex = 0;  // a link to another page's values
    };
    filters.forEach((f) => set(f, state.get(f.dataset.filter) || ""));
    search.value = state.get("search") || "";
    if (baseline) set(baseline, state.get("baseline") || first);
    const column = state.get("sort") || "";
    sort(column.replace(/^-/, ""), !column.startsWith("-"));
    if (state.size) details.filter((each) => each.matches(state.has("baseline") ? "#runs, #speed-up" : "#runs")).forEach((each) => { each.open = true; });
  }
  const changed = () => { filter(); address(); };
  document.getElementById("filters").addEventListener("submit", (event) => event.preventDefault());
  search.addEventListener("input", () => {
    document.getElementById("runs").open = true;
    changed();
  });
  [...filters, baseline].forEach((f) => f && f.addEventListener("change", changed));
  heads.forEach((head) => head.addEventListener("click", () => {
    sort(head.dataset.sort, sorted.column !== head.dataset.sort || !sorted.up);
    address();
  }));
  window.addEventListener("hashchange", () => { restore(); changed(); });

  let kept = null;
  try { kept = localStorage.getItem("gnnpar-theme"); } catch { /* no storage here */ }
  restore();
  changed();
  theme(kept, false);
  root.dataset.ready = "true";
})();
