"use strict";
(() => {
  const root = document.documentElement;
  const specs = JSON.parse(document.getElementById("specs").textContent);
  const plots = [...document.querySelectorAll(".plot")];
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const baseline = document.getElementById("baseline");
  let printing = false;

  // plotly stands in the page as gzip in base64
  async function unpack(id) {
    const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (letter) => letter.charCodeAt(0));
    const script = document.createElement("script");
    script.textContent = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
    document.head.append(script);
  }

  const variable = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  // colours and fonts of the page, put under what the specification says
  function themed(layout) {
    const ink = variable("--ink"), soft = variable("--soft"), grid = variable("--grid");
    const axis = (given) => given && {
      gridcolor: grid, zerolinecolor: grid, linecolor: grid, automargin: true, tickfont: { size: 12, color: ink },
      ...given, title: { ...(given.title || {}), font: { size: 12, color: soft }, standoff: 8 },
    };
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", autosize: true, hovermode: "closest",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: ink },
      hoverlabel: { bgcolor: variable("--raised"), bordercolor: variable("--line"), font: { color: ink } },
      ...layout,
      margin: { l: 48, r: 8, t: 12, b: 40, ...(layout.margin || {}) },
      xaxis: axis(layout.xaxis), yaxis: axis(layout.yaxis),
      legend: { ...(layout.legend || {}), font: { size: 11.5, color: ink }, itemwidth: 30 },
      shapes: (layout.shapes || []).map((s) => ({ ...s, line: { ...s.line, color: soft } })),
    };
  }

  // what the strategy filter selects is in colour, and all else grey; without one, as the specification has it
  function emphasised(spec) {
    const wanted = chosen("strategy"), ofIt = (strategy) => strategy === wanted;
    if (!spec.labels || !wanted || !spec.labels.some((l) => ofIt(l.strategy))) {
      return { data: spec.data, labels: (spec.labels || []).filter((l) => l.shown) };
    }
    const grey = variable("--grey");
    const tint = (trace) => {
      if (!ofIt(trace.meta.strategy)) return grey;
      return trace.line.color.toLowerCase() === grey ? variable("--accent") : trace.line.color;
    };
    const data = spec.data.map((t) => ({ ...t, line: { ...t.line, color: tint(t) } }));
    const order = (t) => (ofIt(t.meta.strategy) ? 1 : 0);
    return {
      data: data.sort((a, b) => order(a) - order(b)),
      labels: spec.labels.filter((l) => ofIt(l.strategy)).map((l) => ({ ...l, colour: variable("--accent") })),
    };
  }

  // labels of curves beside their ends, pushed apart until none covers another
  const pen = document.createElement("canvas").getContext("2d");
  function fitted(text, room) {  // in two lines where one is too long, cut where two are
    const fits = (part) => pen.measureText(part).width <= room;
    if (fits(text)) return [text];
    const cut = (part) => {
      let end = part.length;
      while (end > 1 && !fits(`${part.slice(0, end)}\u2026`)) end -= 1;
      return fits(part) ? part : `${part.slice(0, end)}\u2026`;
    };
    const space = text.indexOf(" ");
    return space < 0 ? [cut(text)] : [cut(text.slice(0, space)), cut(text.slice(space + 1))];
  }
  function labelled(layout, given, width) {
    const size = width < 520 ? 11 : 12, height = (label) => (size + 3) * label.lines.length + 3;
    pen.font = `${size}px ${layout.font.family}`;
    const room = 0.4 * width - 22;
    const labels = given.map((l) => ({ ...l, lines: fitted(l.text, room) }));
    const longest = Math.max(0, ...labels.flatMap((l) => l.lines.map((part) => pen.measureText(part).width)));
    const margin = { ...layout.margin, r: longest + 22 };
    const across = width - margin.l - 24 - margin.r, down = layout.height - margin.t - margin.b;
    const [x0, x1] = layout.xaxis.range, [y0, y1] = layout.yaxis.range;
    const ends = labels.map((l) => ({ ...l, left: ((l.x - x0) / (x1 - x0)) * across, end: ((y1 - l.y) / (y1 - y0)) * down }));
    ends.sort((a, b) => a.end - b.end).forEach((l) => { l.at = l.end; });
    for (let pass = 0; pass < 40; pass += 1) {
      ends.forEach((low, i) => ends.slice(0, i).forEach((high) => {
        const missing = (height(low) + height(high)) / 2 - (low.at - high.at);
        if (missing <= 0 || Math.abs(low.left - high.left) > longest + 14) return;
        low.at += missing / 2;
        high.at -= missing / 2;
      }));
      ends.forEach((l) => { l.at = Math.min(Math.max(l.at, 4), down - 4); });
    }
    const annotations = ends.map((l) => ({
      x: l.x, y: l.y, text: l.lines.join("<br>"), align: "left", ax: 14, ay: l.at - l.end, xanchor: "left", arrowhead: 0, arrowwidth: 1.4,
      arrowcolor: l.colour, font: { size, color: variable("--ink") }, bgcolor: variable("--halo"), borderpad: 1,
    }));
    return { ...layout, margin, annotations };
  }

  function specOf(plot) {
    const spec = specs[plot.id];
    return Array.isArray(spec.data) ? spec : spec[baseline.value];  // a speed-up has one for each baseline
  }

  function draw(plot) {
    const spec = specOf(plot);
    plot.closest("figure").classList.toggle("empty", !spec);
    if (!spec) {
      Plotly.purge(plot);
      plot.textContent = "no ratio over this baseline";
      return;
    }
    if (!plot.data) plot.textContent = "";
    const { data, labels } = emphasised(spec);
    const width = printing ? 330 : plot.clientWidth;
    let layout = themed(spec.layout);
    if (printing) layout.width = width;
    if (labels.length) layout = labelled(layout, labels, width);
    Plotly.react(plot, data, layout, { displayModeBar: false, responsive: true });
  }

  let unpacked = false;
  const drawAll = () => unpacked && plots.filter((plot) => !plot.closest("figure").hidden).forEach(draw);
  let resized = 0;
  window.addEventListener("resize", () => {  // labels have other places at another width
    clearTimeout(resized);
    resized = setTimeout(() => unpacked && plots.filter((p) => specs[p.id].labels).forEach(draw), 150);
  });

  // light, dark: the choice stays where the browser keeps any for files
  const button = document.getElementById("theme");
  const current = () => root.dataset.theme || (dark.matches ? "dark" : "light");
  function choose(theme, keep) {
    if (theme) root.dataset.theme = theme; else delete root.dataset.theme;
    button.textContent = current() === "dark" ? "light" : "dark";
    button.setAttribute("aria-label", `switch to ${button.textContent}`);
    try { if (keep) localStorage.setItem("gnnpar-theme", theme); } catch { /* no storage here */ }
    drawAll();
  }
  button.addEventListener("click", () => choose(current() === "dark" ? "light" : "dark", true));
  dark.addEventListener("change", () => choose(root.dataset.theme, false));
  let before = null;
  window.addEventListener("beforeprint", () => {
    before = root.dataset.theme || "";
    printing = true;
    choose("light", false);
  });
  window.addEventListener("afterprint", () => {
    printing = false;
    choose(before, false);
  });

  // the filters hold for runs and, by model and dataset, for pictures; the address says what they are set to
  const table = document.getElementById("table");
  const rows = [...table.querySelectorAll("tbody tr")];
  const body = table.querySelector("tbody");
  const search = document.getElementById("search");
  const filters = [...document.querySelectorAll("[data-filter]")];
  const heads = [...document.querySelectorAll("[data-sort]")];
  const camel = (name) => name.replace(/_(.)/g, (_, letter) => letter.toUpperCase());
  const first = baseline ? baseline.value : "";
  let sorted = { column: "", up: true };

  function chosen(name) {
    return filters.find((f) => f.dataset.filter === name).value;
  }
  const passes = (data, names) => names.every((name) => !chosen(name) || data[name] === chosen(name));
  function filter() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      const text = Object.values(row.dataset).join(" ").toLowerCase();
      row.hidden = !passes(row.dataset, ["strategy", "model", "dataset"]) || !words.every((w) => text.includes(w));
      shown += row.hidden ? 0 : 1;
    }
    document.getElementById("count").textContent =
      shown === rows.length ? `${rows.length} runs` : `${shown} of ${rows.length} runs`;
    for (const plot of plots) {
      const figure = plot.closest("figure");
      figure.hidden = !passes(figure.dataset, ["model", "dataset"]);
    }
  }

  // sorting is by the exact values; what is missing goes last, either way
  function sort(column, up) {
    const head = heads.find((h) => h.dataset.sort === column);
    if (!head) return;
    sorted = { column, up };
    heads.forEach((h) => h.closest("th").removeAttribute("aria-sort"));
    head.closest("th").setAttribute("aria-sort", up ? "ascending" : "descending");
    const key = camel(column), text = "text" in head.dataset;
    const compare = (a, b) => {
      const [x, y] = [a.dataset[key], b.dataset[key]];
      if (x === "" || y === "") return (x === "") - (y === "");
      return (text ? x.localeCompare(y) : Number(x) - Number(y)) * (up ? 1 : -1);
    };
    [...rows].sort(compare).forEach((row) => body.append(row));
  }

  // a link to the page as it is: only what differs from the page as it opens
  const link = document.getElementById("link");
  function address() {
    const state = new URLSearchParams();
    filters.filter((f) => f.value).forEach((f) => state.set(f.dataset.filter, f.value));
    if (search.value) state.set("search", search.value);
    if (baseline && baseline.value !== first) state.set("baseline", baseline.value);
    if (sorted.column) state.set("sort", (sorted.up ? "" : "-") + sorted.column);
    link.href = `#${state}`;
    if (location.hash.includes("=") || `${state}`) history.replaceState(null, "", `#${state}`);
  }
  function restore() {
    if (location.hash && !location.hash.includes("=")) return;  // a place on the page
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
  }
  function changed() {
    filter();
    address();
    drawAll();
  }
  document.getElementById("filters").addEventListener("submit", (event) => event.preventDefault());
  search.addEventListener("input", () => { filter(); address(); });
  filters.forEach((f) => f.addEventListener("change", changed));
  if (baseline) baseline.addEventListener("change", changed);
  heads.forEach((head) => head.addEventListener("click", () => {
    sort(head.dataset.sort, sorted.column !== head.dataset.sort || !sorted.up);
    address();
  }));
  window.addEventListener("hashchange", () => { restore(); changed(); });

  let kept = null;
  try { kept = localStorage.getItem("gnnpar-theme"); } catch { /* no storage here */ }
  restore();
  filter();
  address();
  choose(kept, false);
  unpack("plotly").then(() => {
    unpacked = true;
    drawAll();
  }).catch(() => {
    plots.forEach((plot) => { plot.textContent = "this browser cannot unpack the pictures: use one of 2023 or later"; });
  }).finally(() => { root.dataset.ready = "true"; });
})();
