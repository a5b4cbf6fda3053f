// A picture that is written pixel by pixel, at the screen's own resolution: textured columns cost
// no more than their pixels, where a canvas's paths cost what their corners and patterns cost.
class Pixels {
  // Width and height in pixels of the page; `ratio`: pixels of the screen in one of them.
  constructor(width, height, ratio) {
    this.ratio = ratio;
    this.canvas = document.createElement("canvas");
    this.width = this.canvas.width = Math.max(1, Math.round(width * ratio));
    this.height = this.canvas.height = Math.max(1, Math.round(height * ratio));
    this.context = this.canvas.getContext("2d");
    this.image = this.context.createImageData(this.width, this.height);
    this.words = new Uint32Array(this.image.data.buffer);
    // Where the texture begins, so that it moves with what it covers.
    this.phase = 0;
  }

  clear() { this.words.fill(0); }

  // `top` and `height` in pixels of the page; `low` and `high` in the screen's, from the row's
  // bottom up.
  column(x, top, height, low, high, texture) {
    const bottom = Math.round((top + height) * this.ratio), fine = Math.max(1, Math.round(this.ratio));
    const across = Math.floor((x + this.phase) / fine) & 7;
    for (let y = bottom - high; y < bottom - low; y++) {
      this.words[y * this.width + x] = texture[((Math.floor(y / fine) & 7) << 3) | across];
    }
  }

  // Columns of shares as stacked areas: their height is the share of time, rounded up. `bins` tells
  // which column belongs to a pixel. Of the first part `least` pixels show at least, as it is often
  // a sliver and what one looks for.
  heap(shares, bins, top, height, textures, least = 1) {
    const parts = textures.length, tall = Math.round(height * this.ratio);
    for (let x = 0; x < this.width; x++) {
      const place = Math.floor((x + bins.offset) / bins.size) * parts;
      let sum = 0, low = 0;
      for (let part = 0; part < parts; part++) {
        const share = shares[place + part];
        if (!(share > 0.002)) continue;
        sum += share;
        const wanted = Math.ceil(Math.min(1, sum) * tall);
        const high = part ? wanted : Math.max(wanted, Math.min(tall, Math.round(least * this.ratio)));
        if (high > low) this.column(x, top, height, low, high, textures[part]);
        low = Math.max(low, high);
      }
    }
  }

  // One texture a pixel; -1: none.
  line(ruling, top, height, textures) {
    const tall = Math.round(height * this.ratio);
    for (let x = 0; x < this.width; x++) {
      if (ruling[x] >= 0) this.column(x, top, height, 0, tall, textures[ruling[x]]);
    }
  }

  // Onto a canvas, with its upper left corner there: pixel on pixel.
  draw(g, x, y) {
    const snap = (place) => Math.round(place * this.ratio) / this.ratio;
    this.context.putImageData(this.image, 0, 0);
    g.imageSmoothingEnabled = false;
    g.drawImage(this.canvas, snap(x), snap(y), this.width / this.ratio, this.height / this.ratio);
  }
}
