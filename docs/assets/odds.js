// The slider of "Choose epsilon and delta": what an attacker can guess, computed in the page. No other file is loaded.
(function () {
  const epsilonAt = document.getElementById("odds-epsilon"), deltaAt = document.getElementById("odds-delta");
  const priorAt = document.getElementById("odds-prior"), says = document.getElementById("odds-says");
  if (!says) return;
  // The normal distribution function: erfc by its Chebyshev fit (Numerical Recipes, erfccheb's short form), 1e-7 relative.
  function erfc(x) {
    const z = Math.abs(x), t = 1 / (1 + z / 2);
    const r = t * Math.exp(-z * z - 1.26551223 + t * (1.00002368 + t * (0.37409196 + t * (0.09678418 + t * (-0.18628806 +
      t * (0.27886807 + t * (-1.13520398 + t * (1.48851587 + t * (-0.82215223 + t * 0.17087277)))))))));
    return x >= 0 ? r : 2 - r;
  }
  const normal = (x) => erfc(-x / Math.SQRT2) / 2;
  // delta of a Gaussian mechanism at epsilon (Balle and Wang 2018), and the mu that it has at a given epsilon and delta.
  const deltaOf = (mu, e) => normal(-e / mu + mu / 2) - Math.exp(e) * normal(-e / mu - mu / 2);
  function muOf(e, delta) {
    let low = 1e-3, high = 60;
    for (let i = 0; i < 80; i++) { const middle = (low + high) / 2; if (deltaOf(middle, e) > delta) high = middle; else low = middle; }
    return low;
  }
  // Right guesses of the best test between N(0, 1) and N(mu, 1) where "in" has a prior.
  function guesses(mu, prior) {
    const cut = mu / 2 + Math.log((1 - prior) / prior) / mu;
    return prior * normal(mu - cut) + (1 - prior) * normal(cut);
  }
  const digits = (share) => share > 0.9995 ? 3 : 1;
  const percent = (share) => (100 * share).toFixed(digits(share)) + " %";
  // A bound is rounded up: below it, the number would be no bound.
  const atMost = (share) => { const unit = 10 ** digits(share); return (Math.ceil(100 * share * unit) / unit).toFixed(digits(share)) + " %"; };
  function show() {
    const e = Math.pow(2, Number(epsilonAt.value)), delta = Number(deltaAt.value), prior = Number(priorAt.value) / 100;
    const odds = prior / (1 - prior) * Math.exp(e), mu = muOf(e, delta);
    says.textContent = `Epsilon ${e.toPrecision(3)}, delta ${deltaAt.value}: an attacker who believes with ${percent(prior)} that a ` +
      `person is in the data can be at most ${atMost(odds / (1 + odds))} sure afterwards (delta ignored). ` +
      `Against a Gaussian mechanism the best attack guesses ${percent(guesses(mu, prior))} right; without any release, ` +
      `${percent(Math.max(prior, 1 - prior))}.`;
  }
  for (const input of [epsilonAt, deltaAt, priorAt]) input.addEventListener("input", show);
  show();
})();
