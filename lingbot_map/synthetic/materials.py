"""Random materials of walls, floors, ceilings and box faces, as a table with named columns."""

from lingbot_map.synthetic.random import between, constant, uniforms
import torch

COLOURS = slice(0, 9)  # three RGB colours, mixed by noise
# Of the noise: contrast of the first mix, threshold of the third colour, weight of fine octaves.
CONTRAST, COVER, ROUGHNESS = 9, 10, 11
TILE_S, TILE_T, ROW_SHIFT, LINE_WIDTH, LINE_GAIN, TILE_SPREAD = 12, 13, 14, 15, 16, 17
PICTURES = 18  # share of the grid cells that hold a poster or a sticker
OPENING_S, OPENING_WIDTH, OPENING_LOW, OPENING_HIGH, OPENING_GAIN, PANES = 19, 20, 21, 22, 23, 24
SKIRTING, SKIRTING_GAIN, EDGE_WIDTH, EDGE_GAIN = 25, 26, 27, 28
NUM_COLUMNS = 29

_DRAW, _KIND, _ROOM_COLOUR, _PICTURES = range(200, 204)
_PLAIN = 1e3  # [m] tile size without visible joints


def materials(seeds: torch.Tensor, cuboids: torch.Tensor) -> torch.Tensor:
    """Return a table (B, 54, 29) for cuboids (B, 9, 8); lengths in metres, colours in 0..1."""
    num_surfaces = 6 * cuboids.shape[1]
    draws = uniforms(
        seeds,
        (
            (_DRAW, (num_surfaces, NUM_COLUMNS)),
            (_KIND, (num_surfaces, 4)),
            (_ROOM_COLOUR, (4,)),
            (_PICTURES, (1,)),
        ),
    )
    draw, kind = draws[_DRAW], draws[_KIND]
    table = between(
        draw,
        (
            *((0.0, 1.0),) * 9,
            (0.4, 1.1),
            (-0.3, 1.5),
            (0.15, 0.5),
            (0.1, 0.6),
            (0.1, 0.6),
            (0.0, 1.0),
            (0.002, 0.012),
            (0.25, 1.3),
            (0.0, 0.35),
            (0.2, 1.0),
            (0.0, 1.0),
            (0.35, 0.6),
            (0.0, 1.0),
            (0.0, 1.0),
            (0.5, 1.7),
            (1.0, 4.0),
            (0.06, 0.14),
            (0.3, 1.5),
            (0.008, 0.02),
            (0.15, 0.45),
        ),
    )
    table[..., COLOURS] = _colours(draw, kind, draws[_ROOM_COLOUR])
    _set_tiles(table, kind)
    _set_room(table, draw, cuboids[:, 0, 3:6] * 2)
    table[..., PICTURES] *= between(draws[_PICTURES], ((0.1, 0.6),))
    table[:, 6:, SKIRTING] = 0
    table[:, 6:, OPENING_WIDTH] = 0
    return table


def _colours(draw, kind, room_draw):
    """Return three related RGB colours (B, 54, 9) of random brightness and tint."""
    tint = draw[..., :9].unflatten(-1, (3, 3)) - 0.5
    bright = between(kind[..., :3], ((0.3, 0.9), (0.35, 1.0), (0.1, 1.0)))
    # The walls of a room share a base colour, with some variation per wall.
    wall = between(room_draw, ((0.4, 0.9), *((-0.2, 0.2),) * 3))
    bright[:, :4, 0] = 0.6 * wall[:, :1] + 0.4 * bright[:, :4, 0]
    bright[..., 1] *= bright[..., 0]
    strength = constant((0.35, 0.4, 0.7), tint.device)[:, None]
    tint = tint * strength
    tint[:, :4, 0] = 0.5 * tint[:, :4, 0] + wall[:, None, 1:]
    return (bright[..., None] * (1 + tint)).clamp(0.02, 1.0).flatten(-2)


def _set_tiles(table, kind):
    """Choose tiles, bricks, planks, stripes or plain paint at random for each surface."""
    die = kind[..., 3]
    planks, stripes, plain = die < 0.25, (die >= 0.25) & (die < 0.4), die > 0.8
    table[..., TILE_S] = torch.where(planks, table[..., TILE_S] * 3, table[..., TILE_S])
    table[..., TILE_T] = torch.where(planks, table[..., TILE_T] * 0.4, table[..., TILE_T])
    table[..., TILE_T] = torch.where(stripes | plain, _PLAIN, table[..., TILE_T])
    table[..., TILE_S] = torch.where(plain, _PLAIN, table[..., TILE_S])
    table[..., ROW_SHIFT] = torch.where(
        planks, table[..., ROW_SHIFT], 0.5 * (table[..., ROW_SHIFT] > 0.6)
    )


def _set_room(table, draw, size):
    """Add a door or window to each wall; make the ceiling brighter and less textured."""
    length = size[:, :2].flip(-1).repeat_interleave(2, -1)  # walls perpendicular to x, x, y, y
    door = draw[:, :4, OPENING_HIGH] < 0.5
    table[:, :4, OPENING_S] = table[:, :4, OPENING_S] * length
    low, high = draw[:, :4, OPENING_LOW], draw[:, :4, LINE_WIDTH]
    table[:, :4, OPENING_LOW] = torch.where(door, -1.0, 0.7 + 0.4 * low)
    table[:, :4, OPENING_HIGH] = torch.where(door, 1.9 + 0.2 * high, 1.5 + 0.7 * high)
    table[:, 4:6, OPENING_WIDTH] = 0
    table[:, 4:6, SKIRTING] = 0
    table[:, 5, COLOURS] = 0.5 + 0.5 * table[:, 5, COLOURS]
    table[:, 4:6, PICTURES] *= 0.6
    table[:, :6, EDGE_WIDTH] = 0.2
