// Images for the model: made no larger than it takes, and sent as data URIs.

// More than this is not sent: a model reads a token for each 1,000 pixels or so, all of them before it answers.
const MOST_PIXELS = 2_000_000;
const NAMED = /\.(jpe?g|png|webp|gif|bmp|avif|heic|svg)$/i;

export const isImage = file => file.type ? file.type.startsWith("image/") : NAMED.test(file.name);

// A data URI of an image that a browser can read, upright and on white.
export async function imageOf(file, taken) {
  let image;
  try { image = await createImageBitmap(file); } catch { throw new Error("this browser does not know its format, or it is damaged."); }
  const most = Math.min(taken.pixels, MOST_PIXELS), scale = Math.min(1, Math.sqrt(most / (image.width * image.height)));
  const canvas = document.createElement("canvas"), brush = canvas.getContext("2d");
  canvas.width = Math.max(1, Math.floor(image.width * scale));
  canvas.height = Math.max(1, Math.floor(image.height * scale));
  brush.fillStyle = "#fff";
  brush.fillRect(0, 0, canvas.width, canvas.height);
  brush.imageSmoothingQuality = "high";
  brush.drawImage(image, 0, 0, canvas.width, canvas.height);
  image.close();
  // Drawings keep their edges as PNG, if that is not much larger.
  const png = /png|gif|bmp/.test(file.type || file.name) ? canvas.toDataURL("image/png") : "";
  return png && png.length < 1_500_000 ? png : canvas.toDataURL("image/jpeg", 0.92);
}
