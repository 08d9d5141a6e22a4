// Draws the figures that the page holds as JSON, in the colours of its theme, and handles sliders and the sample list.
(() => {
  const plots = [...document.querySelectorAll(".plot")];
  const views = []; // set the view that each slider shows
  const narrow = () => window.innerWidth < 600;

  function themed(layout) {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const result = structuredClone(layout);
    Object.assign(result, {
      autosize: true,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom", // on a phone a drag scrolls the page
      font: { family: getComputedStyle(document.body).fontFamily, size: narrow() ? 11 : 13, color: colour("--text") },
      margin: { l: 8, r: 12, t: 34, b: 8 },
      hoverlabel: { bgcolor: colour("--panel"), bordercolor: colour("--soft"), font: { color: colour("--text") } },
    });
    for (const name of ["legend", ...Object.keys(result).filter((key) => /^legend\d/.test(key))]) {
      result[name] = { orientation: "h", x: 0, y: 1.02, xanchor: "left", yanchor: "bottom", ...(result[name] || {}) };
    }
    for (const name of Object.keys(result).filter((key) => /^[xy]axis/.test(key))) {
      const axis = result[name];
      Object.assign(axis, { automargin: true, gridcolor: colour("--grid"), linecolor: colour("--line"), zeroline: false });
      axis.title = { standoff: 10, ...(axis.title || {}) };
      axis.fixedrange = matchMedia("(pointer: coarse)").matches;
    }
    return result;
  }

  function draw() {
    for (const plot of plots) {
      const figure = JSON.parse(document.getElementById(plot.dataset.figure).textContent);
      Plotly.react(plot, figure.data, themed(figure.layout), { displayModeBar: false, responsive: true });
    }
    for (const show of views) show();
  }

  for (const slider of document.querySelectorAll("input[data-plots]")) {
    const names = JSON.parse(slider.dataset.names), ranges = JSON.parse(slider.dataset.ranges || "null");
    slider.value = slider.dataset.first; // browsers keep a choice over a reload
    const show = () => {
      const view = Number(slider.value), traces = Number(slider.dataset.traces);
      document.getElementById(`${slider.id}-value`).textContent = names[view];
      slider.setAttribute("aria-valuetext", names[view]);
      for (const plot of slider.dataset.plots.split(" ").map((id) => document.getElementById(id))) {
        if (ranges) Plotly.relayout(plot, ranges[view]);
        else Plotly.restyle(plot, { visible: plot.data.map((_, i) => Math.floor(i / traces) === view) });
      }
    };
    slider.addEventListener("input", show);
    views.push(show);
  }
  const list = document.getElementById("sample-list");
  if (list) {
    const [step, order] = [document.getElementById("sample-step"), document.getElementById("sample-order")];
    const samples = [...list.querySelectorAll(".sample")];
    const reward = (sample, missing) => (sample.dataset.reward === undefined ? missing : Number(sample.dataset.reward));
    const value = {
      best: (sample) => -reward(sample, -Infinity),
      worst: (sample) => reward(sample, Infinity),
      longest: (sample) => -Number(sample.dataset.tokens),
    };
    const show = () => {
      const chosen = samples.filter((sample) => !step.value || sample.dataset.step === step.value);
      const by = value[order.value];
      chosen.sort((a, b) => (by(a) === by(b) ? 0 : by(a) - by(b))); // stable: ties stay in the order of the file
      const shown = chosen.slice(0, Number(list.dataset.shown));
      for (const sample of samples) sample.hidden = true;
      for (const sample of shown) { sample.hidden = false; list.append(sample); }
      document.getElementById("sample-count").textContent = `${shown.length} of ${chosen.length} samples`;
    };
    for (const choice of [step, order]) choice.addEventListener("change", show);
    document.querySelector(".choices").hidden = false; // without this script all samples are there, and no choice
    show();
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  matchMedia("(max-width: 599px)").addEventListener("change", draw);
  draw();
})();
