// The flow problem of one query, solved exactly in double precision.
//
// With p = softmax(s), f = softmax(u) and C = Σ e^s · Σ e^−s every scaling of the problem has one form,
//
//     z_j = p_j (η − κ f_j)₊ ,      Σ_j z_j + ε η = 1 ,
//
// where absolute scaling has κ = λC and ε = 1/(αC), and the potential's has κ = λn and ε = 0. Let water rise: order the
// keys by friction, and let H_k be the flow already spent when η reaches κ f_k,
//
//     H_1 = ε κ f_1 ,      H_{k+1} = H_k + (p_1 + … + p_k + ε) κ (f_{k+1} − f_k) .
//
// The active keys are those with H_k < 1. With the last of them, k, as the datum,
//
//     z_j = p_j (1 − H_k) / (p_1 + … + p_k + ε)  +  p_j κ (f_k − f_j) .
//
// No term of either sum is negative, so nothing cancels; and each is one exponential of a sum of logarithms, so nothing
// overflows, however wide the scores range.

/**
 * Flows of one query.
 * @param {Float64Array} s scores of resistance, r = softmax(−s)
 * @param {Float64Array} u scores of friction, f = softmax(u)
 * @param {{lam: number, alpha: number, scaling: "absolute" | "potential"}} problem
 * @returns {{flows: Float64Array, active: Uint8Array}} the flows, and which keys are in the active set: what is outside
 *     is a true zero, what is inside may underflow
 */
function solveFlows(s, u, { lam, alpha, scaling }) {
  const n = s.length;
  const flows = new Float64Array(n);
  const active = new Uint8Array(n);
  const logSumS = logSumExp(s, 1);
  const logSumU = logSumExp(u, 1);
  const logC = logSumS + logSumExp(s, -1);
  const absolute = scaling === "absolute";
  const logKappa = Math.log(lam) + (absolute ? logC : Math.log(n)) - logSumU; // multiplies e^u
  const logEps = absolute ? -Math.log(alpha) - logC : -Infinity;

  const order = Uint32Array.from(u.keys()).sort((a, b) => u[a] - u[b]);
  let datum = -1; // the place in the order of the last active key
  let logWeight = logEps; // log(p_1 + … + p_k + ε)
  let spent = Math.exp(logEps + logKappa + u[order[0]]); // H_k
  let left = 0; // 1 − H at the datum
  for (let place = 0; place < n && spent < 1; place++) {
    datum = place;
    left = 1 - spent;
    const key = order[place];
    logWeight = logAddExp(logWeight, s[key] - logSumS);
    if (place + 1 < n) {
      spent += Math.exp(logWeight + logKappa + u[key] + logExpm1(u[order[place + 1]] - u[key]));
    }
  }
  for (let place = 0; place <= datum; place++) {
    const key = order[place];
    const logP = s[key] - logSumS;
    const lift = Math.exp(logP + logKappa + u[key] + logExpm1(u[order[datum]] - u[key]));
    flows[key] = Math.exp(logP - logWeight) * left + lift;
    active[key] = 1;
  }
  return { flows, active };
}

/** log Σ exp(sign · x). */
function logSumExp(x, sign) {
  let top = -Infinity;
  for (const value of x) top = Math.max(top, sign * value);
  let sum = 0;
  for (const value of x) sum += Math.exp(sign * value - top);
  return top + Math.log(sum);
}

function logAddExp(a, b) {
  const top = Math.max(a, b);
  return top === -Infinity ? top : top + Math.log1p(Math.exp(Math.min(a, b) - top));
}

/** log(e^x − 1) for x ≥ 0; −∞ at 0. */
function logExpm1(x) {
  return x > 36 ? x : Math.log(Math.expm1(x));
}
