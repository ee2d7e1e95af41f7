// Draws each chart when it is first seen, in the reader's colours; a pressed name of the legend stands out in all charts.
const { specs, dark } = JSON.parse(document.getElementById("charts").textContent);
const night = matchMedia("(prefers-color-scheme: dark)");
const views = new Map();
let chosen = "";
let printing = false; // on white, whatever the reader's scheme is
let unfolded = [];
const inTheDark = () => night.matches && !printing;

function specOf(plot) {
  let text = JSON.stringify(specs[plot.dataset.figure][plot.dataset.panel]);
  if (inTheDark()) for (const [light, other] of Object.entries(dark)) text = text.replaceAll(light, other);
  return JSON.parse(text);
}

async function draw(plot) {
  views.get(plot)?.finalize();
  const options = { actions: false, renderer: "svg", ast: true, tooltip: { theme: inTheDark() ? "dark" : "light" } };
  const made = await vegaEmbed(plot, specOf(plot), options);
  views.set(plot, made);
  plot.style.minHeight = "";
  show(made);
}

function show({ view }) {
  try { view.signal("chosen", chosen).runAsync(); } catch { /* a chart without mechanisms */ }
}

function drawInside(element) {
  for (const plot of element.querySelectorAll(".plot")) {
    const folded = plot.closest("details:not([open])");
    if (!views.has(plot) && !folded) draw(plot);
  }
}

function press(button) {
  chosen = chosen === button.dataset.mechanism ? "" : button.dataset.mechanism;
  for (const one of document.querySelectorAll("[data-mechanism]")) one.setAttribute("aria-pressed", String(one.dataset.mechanism === chosen));
  views.forEach(show);
}

async function copy(button) {
  try {
    await navigator.clipboard.writeText(button.dataset.copy);
    button.textContent = "copied";
  } catch { getSelection().selectAllChildren(button.previousElementSibling); /* the reader copies what is marked */ }
}

async function saveDrawn(button) {
  const plots = [...document.querySelectorAll(`[data-figure="${CSS.escape(button.dataset.svg)}"]`)].filter((plot) => views.has(plot));
  for (const [place, plot] of plots.entries()) {
    const href = URL.createObjectURL(new Blob([await views.get(plot).view.toSVG()], { type: "image/svg+xml" }));
    const download = `${button.dataset.svg}${plots.length > 1 ? `-${place + 1}` : ""}.svg`;
    Object.assign(document.createElement("a"), { href, download }).click();
  }
}

// The printer waits for what this does and for its promises, and for no later event such as "toggle".
function lay() {
  printing = true;
  unfolded = [...document.querySelectorAll("details:not([open])")];
  for (const one of unfolded) one.open = true;
  if (night.matches) [...views.keys()].forEach(draw);
  drawInside(document);
}

function putBack() {
  printing = false;
  for (const one of unfolded) one.open = false;
  if (night.matches) [...views.keys()].forEach(draw);
}

function unfold() {
  const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const folded = target && target.closest("details");
  if (folded) { folded.open = true; target.scrollIntoView(); }
}

document.addEventListener("toggle", (event) => event.target.open && drawInside(event.target), true);
document.addEventListener("click", (event) => { const button = event.target.closest("[data-mechanism]"); if (button) press(button); });
document.addEventListener("click", (event) => { const button = event.target.closest("[data-copy]"); if (button) copy(button); });
document.addEventListener("click", (event) => { const button = event.target.closest("[data-svg]"); if (button) saveDrawn(button); });
night.addEventListener("change", () => [...views.keys()].forEach(draw));
addEventListener("hashchange", unfold);
addEventListener("beforeprint", lay);
addEventListener("afterprint", putBack);
unfold();
drawInside(document);
