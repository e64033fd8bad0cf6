"""
Per-pixel functions of the room renderer: rays, surfaces, textures, camera.

All functions are element-wise over pixels (F, H, W) or planes (3, F, H, W), so that each compiles
to one kernel. There are no matrix products, so TF32 or autocast of a training run cannot affect
the depth.
"""

from lingbot_map.synthetic import materials as col
from lingbot_map.synthetic.random import hash32, hash_cell, hash_fraction
import torch


def cast_room(camera, u, v, room, first_surface):
    """
    Return z-depth [m] and surface number (int32) of the room's inner faces, each (F, H, W).

    camera (F, 15, 1, 1): rotation by rows, position, focal length, cx, cy; u (W,), v (H, 1) [px];
    room (F, 8, 1, 1): centre, half size, cos and sin of yaw; first_surface (F, 1, 1) int32.
    """
    depth, face = None, None
    for axis, (start, step) in enumerate(_rays(camera, u, v, room)):
        half = room[:, 3 + axis]
        away = step > 0
        exit_depth = (torch.where(away, half, -half) - start) / step
        number = 2 * axis + away.to(torch.int32)
        if depth is None:
            depth, face = exit_depth, number
        else:
            face = torch.where(exit_depth < depth, number, face)
            depth = torch.minimum(exit_depth, depth)
    return depth, face + first_surface


def cast_box(depth, surface, camera, u, v, box, first_surface):
    """Return depth and surface, replaced by those of the box (F, 8, 1, 1) where it is nearer."""
    near, far, face = None, None, None
    for axis, (start, step) in enumerate(_rays(camera, u, v, box)):
        half = box[:, 3 + axis]
        middle, reach = -start / step, half / step.abs()
        number = 2 * axis + (step < 0).to(torch.int32)
        if near is None:
            near, far, face = middle - reach, middle + reach, number
        else:
            face = torch.where(middle - reach > near, number, face)
            near = torch.maximum(near, middle - reach)
            far = torch.minimum(far, middle + reach)
    hit = (near < far) & (near > 1e-3) & (near < depth)
    return torch.where(hit, near, depth), torch.where(hit, face + first_surface, surface)


def _rays(camera, u, v, cuboid):
    """Return start and step per metre of z-depth along the three axes of the cuboid."""
    x, y = (u - camera[:, 13]) / camera[:, 12], (v - camera[:, 14]) / camera[:, 12]
    cos, sin = cuboid[:, 6], cuboid[:, 7]
    step = [
        camera[:, 3 * i] * x + camera[:, 3 * i + 1] * y + camera[:, 3 * i + 2] for i in range(3)
    ]
    start = [camera[:, 9 + i] - cuboid[:, i] for i in range(3)]
    rays = [_rotate(start, cos, sin), _rotate(step, cos, sin)]
    return [
        (start, torch.where(step.abs() < 1e-9, 1e-9, step))
        for start, step in zip(*rays, strict=True)
    ]


def _rotate(vector, cos, sin):
    return cos * vector[0] + sin * vector[1], cos * vector[1] - sin * vector[0], vector[2]


def locate(depth, surface, camera, u, v, geometry, material, light):
    """
    Return surface coordinates s, t [m], the pixel's footprint there [m] and the light on it.

    geometry (14, N) and material (29, N) by surface number; light (F, 4, 1, 1): position [m],
    ambient share.
    """
    surface = surface.long()
    x, y = (u - camera[:, 13]) / camera[:, 12], (v - camera[:, 14]) / camera[:, 12]
    s, t, slant, toward, away = 0.0, 0.0, 0.0, 0.0, 0.0
    for i in range(3):
        step = camera[:, 3 * i] * x + camera[:, 3 * i + 1] * y + camera[:, 3 * i + 2]
        point = camera[:, 9 + i] + depth * step
        offset = point - geometry[i][surface]
        s = s + offset * geometry[3 + i][surface]
        t = t + offset * geometry[6 + i][surface]
        normal = geometry[9 + i][surface]
        slant = slant + normal * step
        to_light = light[:, i] - point
        toward = toward + normal * to_light
        away = away + to_light * to_light
    cosine = slant.abs() * torch.rsqrt(1 + x * x + y * y)
    footprint = depth / camera[:, 12] / cosine.clamp(min=0.2)
    lambert = (toward * torch.rsqrt(away + 0.01)).clamp(min=0) * (2.2 / (1 + away / 9))
    ambient = light[:, 3]
    rim = torch.minimum(
        torch.minimum(s, geometry[12][surface] - s), torch.minimum(t, geometry[13][surface] - t)
    )
    rim = torch.exp(-rim.clamp(min=0) / material[col.EDGE_WIDTH][surface])
    shade = (ambient + (1 - ambient) * lambert) * (1 - material[col.EDGE_GAIN][surface] * rim)
    return s, t, footprint, shade


def add_octave(first, second, s, t, footprint, surface, keys, material, cell, salt):
    """Add one octave of value noise with the cell size [m] to both noise sums."""
    surface = surface.long()
    x, y = s / cell, t / cell
    i, j = x.floor(), y.floor()
    x, y = _ease(x - i), _ease(y - j)
    i, j, key = i.to(torch.int32), j.to(torch.int32), keys[surface] + salt
    corners = [hash_cell(i + di, j + dj, key) for dj in (0, 1) for di in (0, 1)]
    gain = (cell / 1.6) ** material[col.ROUGHNESS][surface] * _visible(cell, footprint)
    sums = []
    for total, part in ((first, 0), (second, 1)):
        a, b, c, d = (hash_fraction(corner, part) for corner in corners)
        low, high = a + (b - a) * x, c + (d - c) * x
        sums.append(total + gain * (2 * (low + (high - low) * y) - 1))
    return tuple(sums)


def paint_base(first, second, s, t, footprint, surface, keys, material):
    """Return RGB planes (3, F, H, W) of noisy paint with tiles, planks, bricks or stripes."""
    surface = surface.long()
    a, b, c = (material[3 * i : 3 * i + 3][:, surface] for i in range(3))
    mix = (0.5 + material[col.CONTRAST][surface] * first).clamp(0, 1)
    patch = (0.5 + 4 * (second - material[col.COVER][surface])).clamp(0, 0.85)
    rgb = a + (b - a) * mix
    rgb = rgb + (c - rgb) * patch

    size_s, size_t = material[col.TILE_S][surface], material[col.TILE_T][surface]
    row = (t / size_t).floor()
    s = s + material[col.ROW_SHIFT][surface] * row * size_s
    column = (s / size_s).floor()
    tile = hash_cell(column.to(torch.int32), row.to(torch.int32), keys[surface] + 101)
    visible = _visible(torch.minimum(size_s, size_t), footprint)
    spread = material[col.TILE_SPREAD][surface] * visible
    rgb = rgb * (1 + spread * (2 * hash_fraction(tile, 0) - 1))
    joint = torch.minimum(
        size_s / 2 - (s - (column + 0.5) * size_s).abs(),
        size_t / 2 - (t - (row + 0.5) * size_t).abs(),
    )
    width = material[col.LINE_WIDTH][surface]
    line = _inside(width - joint, footprint) * visible * (width * 2 / footprint).clamp(max=1)
    return rgb * (1 + (material[col.LINE_GAIN][surface] - 1) * line)


def paint_pictures(rgb, s, t, footprint, surface, keys, material, cell, salt):
    """Paint a random rectangle with a grid of colours in some of the cells."""
    surface = surface.long()
    i, j = (s / cell).floor(), (t / cell).floor()
    key = hash_cell(i.to(torch.int32), j.to(torch.int32), keys[surface] + salt)
    shape, place, fill = hash32(key + 1), hash32(key + 2), hash32(key + 3)
    present = (hash_fraction(key, 0) < material[col.PICTURES][surface]).float()
    half_s = cell * (0.14 + 0.3 * hash_fraction(shape, 0))
    half_t = cell * (0.14 + 0.3 * hash_fraction(shape, 1))
    s = s - (i * cell + half_s + (cell - 2 * half_s) * hash_fraction(place, 0))
    t = t - (j * cell + half_t + (cell - 2 * half_t) * hash_fraction(place, 1))
    depth_in = torch.minimum(half_s - s.abs(), half_t - t.abs())

    count_s = 2 + (hash_fraction(shape, 2) * 5).floor()
    count_t = 2 + (hash_fraction(place, 2) * 7).floor()
    piece = hash_cell(
        ((s / half_s + 1) / 2 * count_s).floor().to(torch.int32),
        ((t / half_t + 1) / 2 * count_t).floor().to(torch.int32),
        fill,
    )
    piece_size = torch.minimum(2 * half_s / count_s, 2 * half_t / count_t)
    strength = 0.7 * _visible(piece_size, footprint)
    colour = [
        hash_fraction(fill, i) * (1 - strength) + hash_fraction(piece, i) * strength
        for i in range(3)
    ]
    grey = (colour[0] + colour[1] + colour[2]) / 3
    colourful = hash_fraction(key, 2)
    picture = torch.stack([grey + (channel - grey) * colourful for channel in colour])
    frame = _inside(0.04 * cell - depth_in, footprint)
    picture = picture + (hash_fraction(key, 1) - picture) * frame
    return rgb + (picture - rgb) * (_inside(depth_in, footprint) * present)


def paint_openings(rgb, s, t, footprint, surface, material, shade):
    """Paint doors, windows and skirting boards, then apply the light."""
    surface = surface.long()
    low, high = material[col.OPENING_LOW][surface], material[col.OPENING_HIGH][surface]
    width = material[col.OPENING_WIDTH][surface]
    x = s - material[col.OPENING_S][surface]
    y = t - (low + high) / 2
    inside = torch.minimum(width - x.abs(), (high - low) / 2 - y.abs())
    panes = material[col.PANES][surface].floor()
    pane = 2 * width / panes + 1e-6
    bar = torch.minimum(
        ((x + width) / pane - ((x + width) / pane).round()).abs() * pane,
        (y / 0.45 - (y / 0.45).round()).abs() * 0.45,
    )
    gain = material[col.OPENING_GAIN][surface] * (1 - 0.6 * _inside(0.02 - bar, footprint))
    gain = torch.where(inside < 0.06, 0.45, gain)
    cover = _inside(inside, footprint) * (width > 0).float()
    rgb = rgb * (1 + (gain - 1) * cover)
    board = material[col.SKIRTING][surface] - t
    rgb = rgb * (
        1 + (material[col.SKIRTING_GAIN][surface] - 1) * _inside(board, footprint) * (1 - cover)
    )
    return rgb * shade


def develop(rgb, u, v, look, gains, noise_key):
    """
    Apply the camera to lit RGB planes; return images (F, 3, H, W) uint8.

    look (F, 5, 1, 1): vignetting, blur, noise [grey levels], gamma, exposure; gains (3, F, 1, 1);
    noise_key (F, 1, 1) int32.
    """
    height, width = rgb.shape[-2:]
    x, y = u / width - 0.5, v / height - 0.5
    edge = look[:, 1]
    rgb = torch.nn.functional.pad(rgb, (1, 1, 1, 1), mode='replicate')
    rows = rgb[..., 1:-1, :] * (1 - 2 * edge) + (rgb[..., :-2, :] + rgb[..., 2:, :]) * edge
    rgb = rows[..., 1:-1] * (1 - 2 * edge) + (rows[..., :-2] + rows[..., 2:]) * edge
    rgb = rgb * gains * (look[:, 4] * (1 - look[:, 0] * (x * x + y * y)))
    # Soft saturation: bright areas keep their texture.
    rgb = (1 - torch.exp(-1.5 * rgb)).clamp(min=0) ** look[:, 3]
    pixel = (v.to(torch.int32) * width + u.to(torch.int32)) * 3
    bits = torch.stack([hash32(hash32(pixel + i) + noise_key) for i in range(3)])
    grain = sum((bits >> shift) & 255 for shift in (0, 8, 16, 24)).float() - 510.0
    rgb = rgb * 255 + grain * (look[:, 2] * (1 / 147.8))
    return (rgb + 0.5).clamp(0, 255).to(torch.uint8).transpose(0, 1)


def _ease(x):
    return x * x * (3 - 2 * x)


def _visible(size, footprint):
    """Return the weight of a detail: 0 if too small for the pixel grid, rising to 1."""
    return (size / footprint / 1.5 - 1).clamp(0, 1)


def _inside(distance, footprint):
    """Return the share of a pixel on the positive side of an edge, by its signed distance."""
    return (distance / footprint + 0.5).clamp(0, 1)
