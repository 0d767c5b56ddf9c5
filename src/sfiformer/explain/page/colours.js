// Viridis on a logarithmic scale from LEAST to 1, as in the static maps.

const LEAST = 1e-4; // flows below are coloured like this one; exact zeros have no colour
const VIRIDIS = [
  [68, 1, 84], [72, 26, 108], [71, 47, 125], [65, 68, 135], [57, 86, 140], [49, 104, 142],
  [42, 120, 142], [35, 136, 142], [31, 152, 139], [34, 168, 132], [53, 183, 121], [84, 197, 104],
  [122, 209, 81], [165, 219, 54], [210, 226, 27], [253, 231, 37],
];

/** 0 at LEAST and below, 1 at a flow of 1. */
function logShare(flow) {
  return Math.min(1, Math.max(0, 1 - Math.log(flow) / Math.log(LEAST)));
}

function colour(flow) {
  const at = logShare(flow) * (VIRIDIS.length - 1);
  const below = Math.min(Math.floor(at), VIRIDIS.length - 2);
  const mix = (channel) =>
    Math.round(VIRIDIS[below][channel] + (at - below) * (VIRIDIS[below + 1][channel] - VIRIDIS[below][channel]));
  return `rgb(${mix(0)}, ${mix(1)}, ${mix(2)})`;
}
