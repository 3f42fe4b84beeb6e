"use strict";
(() => {
  const root = document.documentElement;
  const specs = JSON.parse(document.getElementById("specs").textContent);
  const plots = [...document.querySelectorAll(".plot")];
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const baseline = document.getElementById("baseline");
  let printing = false;

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

  function specOf(plot) {
    const spec = specs[plot.id];
    return spec.data ? spec : spec[baseline.value];  // a speed-up has one for each baseline
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
    const layout = themed(spec.layout);
    if (printing) layout.width = 330;
    Plotly.react(plot, spec.data, layout, { displayModeBar: false, responsive: true });
  }

  const drawAll = () => plots.filter((plot) => !plot.closest("figure").hidden).forEach(draw);

  // light, dark: the choice stays where the browser keeps any for files
  const button = document.getElementById("theme");
  const current = () => root.dataset.theme || (dark.matches ? "dark" : "light");
  function choose(theme, keep) {
    if (theme) root.dataset.theme = theme; else delete root.dataset.theme;
    button.textContent = current() === "dark" ? "light" : "dark";
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

  // the filters hold for runs and, by model and dataset, for pictures
  const rows = [...document.querySelectorAll("#table tbody tr")];
  const body = document.querySelector("#table tbody");
  const search = document.getElementById("search");
  const filters = [...document.querySelectorAll("[data-filter]")];
  const passes = (data, names) =>
    filters.every((f) => !f.value || !names.includes(f.dataset.filter) || data[f.dataset.filter] === f.value);
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
      const was = figure.hidden;
      figure.hidden = !passes(figure.dataset, ["model", "dataset"]);
      if (was && !figure.hidden) draw(plot);
    }
  }
  search.addEventListener("input", filter);
  filters.forEach((f) => f.addEventListener("change", filter));

  // sorting is by the exact values; what is missing goes last, either way
  const camel = (name) => name.replace(/_(.)/g, (_, letter) => letter.toUpperCase());
  for (const head of document.querySelectorAll("[data-sort]")) {
    head.addEventListener("click", () => {
      const cell = head.closest("th"), up = cell.getAttribute("aria-sort") !== "ascending";
      document.querySelectorAll("#table th").forEach((th) => th.setAttribute("aria-sort", "none"));
      cell.setAttribute("aria-sort", up ? "ascending" : "descending");
      const key = camel(head.dataset.sort), text = "text" in head.dataset;
      const compare = (a, b) => {
        const [x, y] = [a.dataset[key], b.dataset[key]];
        if (x === "" || y === "") return (x === "") - (y === "");
        return (text ? x.localeCompare(y) : Number(x) - Number(y)) * (up ? 1 : -1);
      };
      [...rows].sort(compare).forEach((row) => body.append(row));
    });
  }

  if (baseline) baseline.addEventListener("change", () => plots.filter((p) => !specs[p.id].data).forEach(draw));
  let kept = null;
  try { kept = localStorage.getItem("gnnpar-theme"); } catch { /* no storage here */ }
  filter();
  choose(kept, false);
  root.dataset.ready = "true";
})();
