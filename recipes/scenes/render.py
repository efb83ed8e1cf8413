"""Renderer of scenes: a `Scene` becomes a square image, computed with NumPy.

The image depends only on the scene and its seed. Solids are shaded by their surface normals. Grounds are noise textures
in perspective. Skies are colour gradients with clouds, stars, a sun or a moon. Lengths and positions are in units; an
image is 128 units wide and high for any number of pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .vocabulary import Scene, Solid

SIZE = 128  # width and height of an image in units; also the default number of pixels
TEXTURE = 256  # width and height in texels of the textures, which repeat without a visible seam
LEVELS = 6  # number of mipmap levels: smoothed versions of a texture, each over squares of twice the previous side
Floats = NDArray[Any]

RGB = {
    "red": (0.86, 0.10, 0.10),
    "orange": (0.98, 0.50, 0.06),
    "yellow": (0.97, 0.87, 0.12),
    "green": (0.12, 0.66, 0.20),
    "blue": (0.13, 0.28, 0.90),
    "purple": (0.50, 0.16, 0.74),
    "pink": (0.98, 0.50, 0.74),
    "white": (0.96, 0.96, 0.96),
    "black": (0.10, 0.10, 0.11),
}
GROUND_TINT = {
    "clear": (1, 1, 1),
    "sunset": (1.0, 0.84, 0.76),
    "night": (0.36, 0.42, 0.60),
    "overcast": (0.80, 0.82, 0.85),
}
SOLID_TINT = {
    "clear": (1, 1, 1),
    "sunset": (1.0, 0.93, 0.88),
    "night": (0.74, 0.76, 0.86),
    "overcast": (0.92, 0.93, 0.95),
}
REFLECTED = {"water": 0.5, "wood": 0.16, "stone": 0.1}  # brightness of a solid's reflection in the ground, 0 .. 1
LIGHT = np.array([-0.52, -0.64, 0.57], np.float32)
VIEWER = np.array([0, 0, 1], np.float32)
LIGHT_HALF = (LIGHT + VIEWER) / np.linalg.norm(LIGHT + VIEWER)


def render(scene: Scene, size: int = SIZE) -> NDArray[np.uint8]:
    """Render a scene as an RGB image, uint8 `[size, size, 3]` with axes height, width and channel."""
    rng = np.random.default_rng(scene.seed)
    horizon = int(rng.integers(46, 58))
    canvas = np.empty((size, size, 3), np.float32)
    first_ground_row = horizon * size // SIZE  # first row of the ground
    pixel_centres = _compute_pixel_centres(size)
    canvas[:first_ground_row] = _paint_sky(scene.sky, horizon, pixel_centres, rng)
    canvas[first_ground_row:] = _paint_ground(scene.ground, horizon, pixel_centres, rng) * np.asarray(
        GROUND_TINT[scene.sky], np.float32
    )
    placed = []
    for solid in scene.solids:
        low, high = (18, 21) if solid.size == "small" else (29, 33) if len(scene.solids) == 1 else (27, 29)
        radius = rng.uniform(low, high)
        base_y = rng.uniform(max(horizon + 30, 92), 118)
        placed.append((base_y, radius, solid))
    placed.sort(key=lambda item: item[0])  # Far solids are drawn first, so that near solids cover them.
    for base_y, radius, solid in placed:
        _paint_shadow(canvas, solid.x * SIZE, base_y, radius, first_ground_row, pixel_centres)
    for base_y, radius, solid in placed:
        _paint_solid(canvas, solid, radius, base_y, scene, rng)
    return np.rint(np.clip(canvas, 0, 1) * 255).astype(np.uint8)


def _compute_pixel_centres(size: int) -> Floats:
    """Return the pixel centres along one axis in units, `[size]`. For 128 pixels they are 0, 1, .. 127."""
    return np.asarray((np.arange(size, dtype=np.float32) + 0.5) * (SIZE / size) - 0.5)


# ---------------------------------------------------------------- textures


@lru_cache(maxsize=1)
def _make_textures() -> dict[str, Floats]:
    """Return the textures `soft`, `fine`, `wave` and `cells` with all mipmap levels, `[levels, 256, 256]` in 0 .. 1."""
    rng = np.random.default_rng(7)

    def make_noise(*octaves: tuple[int, float]) -> Floats:
        total = np.zeros((TEXTURE, TEXTURE), np.float32)
        for cells, weight in octaves:
            total += weight * _make_value_noise(rng, cells)
        total -= total.min()
        return np.asarray(total / total.max())

    points = rng.random((72, 2)) * TEXTURE
    grid = np.stack(np.meshgrid(np.arange(TEXTURE), np.arange(TEXTURE), indexing="ij"), -1)
    gap = np.abs(grid[:, :, None] - points)  # [256, 256, points, 2]
    # Distances wrap around at the texture's edges, since textures repeat; the nearest point comes first.
    distance = np.sort(np.hypot(*np.moveaxis(np.minimum(gap, TEXTURE - gap), -1, 0)), axis=-1)
    textures = {
        "soft": make_noise((4, 1.0), (8, 0.6), (16, 0.35), (32, 0.2)),
        "fine": make_noise((32, 1.0), (64, 0.9), (128, 0.5)),
        "wave": make_noise((8, 0.5), (16, 1.0), (32, 0.6)),
        "cells": np.clip((distance[..., 1] - distance[..., 0]) / 5.0, 0, 1).astype(np.float32),
    }
    return {name: _make_mipmap_levels(texture) for name, texture in textures.items()}


def _make_mipmap_levels(texture: Floats) -> Floats:
    """Return mipmap levels of a texture, `[levels, 256, 256]`; level i averages over 2**i by 2**i texels."""
    levels = [texture]
    for level in range(LEVELS - 1):
        texture_level = levels[-1]
        step = 2**level
        texture_level = (texture_level + np.roll(texture_level, step, 0)) / 2
        texture_level = (texture_level + np.roll(texture_level, step, 1)) / 2
        levels.append(np.roll(texture_level, (-(step // 2), -(step // 2)), (0, 1)))
    return np.stack(levels)


def _make_value_noise(rng: np.random.Generator, num_cells: int) -> Floats:
    """Return a texture `[256, 256]` that smoothly interpolates a lattice of `num_cells x num_cells` random values."""
    lattice = rng.random((num_cells, num_cells)).astype(np.float32)
    at = np.arange(TEXTURE) * num_cells / TEXTURE
    low = at.astype(int)
    part = (at - low).astype(np.float32)
    part = part * part * (3 - 2 * part)  # smoothstep, so that no edges show at the lattice lines
    rows = lattice[low] * (1 - part)[:, None] + lattice[(low + 1) % num_cells] * part[:, None]
    return np.asarray(rows[:, low] * (1 - part) + rows[:, (low + 1) % num_cells] * part)


def _sample_texture(name: str, texture_x: Floats, texture_y: Floats) -> Floats:
    """Return the values of a texture at given positions, `[rows, columns]`, interpolated between texels.

    Each row uses the mipmap level whose squares are about as large as a pixel of the row. So distant ground looks
    smooth, not noisy.

    Args:
        name: name of the texture.
        texture_x: horizontal positions in texels, `[rows, columns]`.
        texture_y: vertical positions in texels, `[rows, 1]`.
    """
    levels = _make_textures()[name]
    wide = np.abs(texture_x[:, 1] - texture_x[:, 0])
    high = np.abs(np.gradient(texture_y[:, 0]))
    level = np.rint(np.log2(np.maximum(np.sqrt(wide * high), 1))).astype(np.int64).clip(0, LEVELS - 1)[:, None]
    x = np.floor(texture_x)
    y = np.floor(texture_y)
    right = (texture_x - x).astype(np.float32)
    below = (texture_y - y).astype(np.float32)
    left = x.astype(np.int64) % TEXTURE
    top = y.astype(np.int64) % TEXTURE
    flat = levels.ravel()

    def interpolate_row(texture_rows: Floats) -> Floats:
        base = (level * TEXTURE + texture_rows) * TEXTURE
        left_texels = flat[base + left]
        return np.asarray(left_texels + (flat[base + (left + 1) % TEXTURE] - left_texels) * right)

    upper_row = interpolate_row(top)
    return np.asarray(upper_row + (interpolate_row((top + 1) % TEXTURE) - upper_row) * below)


def _paint_ground(kind: str, horizon: int, pixel_centres: Floats, rng: np.random.Generator) -> Floats:
    rows = pixel_centres[horizon * len(pixel_centres) // SIZE :, None]
    depth = 900.0 / (rows - horizon + 7.0)
    near = np.clip((rows - horizon) / 34.0, 0, 1)
    across = (pixel_centres[None] - SIZE / 2) * depth / 22.0 + np.float32(rng.uniform(0, TEXTURE))
    away = depth * 3.2 + np.float32(rng.uniform(0, TEXTURE))
    soft = _sample_texture("soft", across, away) - 0.5
    if kind == "grass":
        blades = _sample_texture("fine", across * 2.2, away * 0.5) - 0.5
        level = 0.5 + near * (0.5 * blades + 0.45 * soft)
        low = (0.10, 0.30, 0.05)
        high = (0.36, 0.66, 0.16)
    elif kind == "sand":
        ripple = _sample_texture("wave", across * 0.8, away * 1.4) - 0.5
        level = 0.55 + (0.25 + 0.75 * near) * (0.5 * ripple + 0.3 * soft)
        low = (0.66, 0.52, 0.28)
        high = (0.95, 0.83, 0.56)
    elif kind == "snow":
        level = 0.66 + (0.2 + 0.8 * near) * 0.9 * soft
        low = (0.70, 0.78, 0.88)
        high = (1.0, 1.0, 1.0)
    elif kind == "water":
        wave = _sample_texture("wave", across * 0.7, away * 2.0) - 0.5
        level = 0.42 + (0.3 + 0.7 * near) * 0.8 * wave
        low = (0.01, 0.12, 0.34)
        high = (0.22, 0.58, 0.82)
    elif kind == "stone":
        cells = _sample_texture("cells", across * 1.1, away * 1.1)
        level = 0.16 + 0.5 * cells + 0.4 * soft * near
        low = (0.20, 0.20, 0.21)
        high = (0.66, 0.65, 0.63)
    else:  # wood
        planks = across / 22.0
        plank = np.floor(planks)
        seam = np.clip(np.abs(planks - plank - 0.5) * -14.0 + 7.0, 0, 1)
        shade = (np.sin(plank * 12.9898) * 43758.5453) % 1.0  # a pseudo-random brightness for each plank
        grain = _sample_texture("fine", across * 1.5, away * 0.16) - 0.5
        level = (0.42 + 0.28 * shade + 0.22 * grain) * (0.25 + 0.75 * seam)
        low = (0.17, 0.08, 0.03)
        high = (0.74, 0.46, 0.24)
    level = np.clip(level, 0, 1)[..., None].astype(np.float32)
    return np.asarray(low, np.float32) * (1 - level) + np.asarray(high, np.float32) * level


def _paint_sky(kind: str, horizon: int, pixel_centres: Floats, rng: np.random.Generator) -> Floats:
    rows = pixel_centres[: horizon * len(pixel_centres) // SIZE, None]
    height = (rows / (horizon - 1))[..., None]  # 0 at the top, 1 at the horizon
    dx, dy = rng.integers(0, TEXTURE, 2)
    clouds = _sample_texture("soft", pixel_centres[None] + np.float32(dx), rows * 2 + np.float32(dy))[..., None]
    disc_x = rng.uniform(16, SIZE - 16)
    if kind == "clear":
        sky = _make_sky_gradient((0.20, 0.48, 0.88), (0.72, 0.87, 0.98), height, pixel_centres)
        cover = np.clip((clouds - 0.55) * 5.0, 0, 1)
        return np.asarray(sky * (1 - cover) + np.float32(0.98) * cover)
    if kind == "sunset":
        sky = _make_sky_gradient((0.36, 0.16, 0.44), (1.0, 0.62, 0.22), height.clip(0) ** 1.3, pixel_centres)
        sky += np.clip((clouds - 0.5) * 1.6, 0, 1) * np.asarray((0.34, 0.02, 0.06), np.float32)
        return _paint_disc(sky, pixel_centres, disc_x, horizon - rng.uniform(4, 10), 7.5, (1.0, 0.93, 0.62))
    if kind == "night":
        sky = _make_sky_gradient((0.01, 0.01, 0.07), (0.08, 0.10, 0.26), height, pixel_centres)
        for row, column in rng.integers(0, (horizon, SIZE), (26, 2)):
            light = rng.uniform(0.3, 0.9)
            above, left_pixel = np.searchsorted(pixel_centres, (row - 1, column - 1))
            near = (
                slice(above, above + len(pixel_centres) // 64),
                slice(left_pixel, left_pixel + len(pixel_centres) // 64),
            )
            spread = np.exp(
                -1.6 * ((pixel_centres[near[0], None] - row) ** 2 + (pixel_centres[None, near[1]] - column) ** 2)
            )
            sky[near] += np.float32(light) * spread[: len(sky[near])][..., None]
        return _paint_disc(sky, pixel_centres, disc_x, rng.uniform(11, 24), 6.5, (0.97, 0.96, 0.85))
    sky = _make_sky_gradient((0.50, 0.53, 0.57), (0.74, 0.76, 0.78), height, pixel_centres)
    return np.asarray(sky + (clouds - 0.5) * np.float32(0.34))


def _make_sky_gradient(
    top_colour: tuple[float, ...], bottom_colour: tuple[float, ...], height: Floats, pixel_centres: Floats
) -> Floats:
    sky = np.asarray(top_colour, np.float32) * (1 - height) + np.asarray(bottom_colour, np.float32) * height
    return np.repeat(sky, len(pixel_centres), axis=1)  # [rows, size, 3]


def _paint_disc(
    sky: Floats, pixel_centres: Floats, x: float, y: float, radius: float, colour: tuple[float, float, float]
) -> Floats:
    scale = len(pixel_centres) / SIZE
    away = np.hypot(pixel_centres[: len(sky), None] - y, pixel_centres[None] - x)
    sky = sky + 0.22 * np.exp(-((away / (2.6 * radius)) ** 2))[..., None] * np.asarray(
        colour, np.float32
    )  # glow of the disc
    cover = np.clip((radius - away) * scale + 0.5, 0, 1)[..., None].astype(np.float32)
    return np.asarray(sky * (1 - cover) + np.asarray(colour, np.float32) * cover)


# ---------------------------------------------------------------- solids


def _paint_shadow(
    canvas: Floats, x: float, base_y: float, radius: float, first_ground_row: int, pixel_centres: Floats
) -> None:
    """Darken the ground by the solid's shadow on the right, and more where the solid touches the ground."""
    rows = pixel_centres[first_ground_row:, None]
    columns = pixel_centres[None]
    cast = np.hypot((columns - x - 0.48 * radius) / (1.35 * radius), (rows - base_y + 0.10 * radius) / (0.30 * radius))
    touch = np.hypot((columns - x - 0.08 * radius) / (0.95 * radius), (rows - base_y + 0.03 * radius) / (0.20 * radius))
    canvas[first_ground_row:] *= 1 - 0.45 * np.clip(1.5 - 1.5 * cast, 0, 1)[..., None]
    canvas[first_ground_row:] *= 1 - 0.35 * np.clip(1.5 - 1.5 * touch, 0, 1)[..., None]


def _paint_solid(
    canvas: Floats, solid: Solid, radius: float, base_y: float, scene: Scene, rng: np.random.Generator
) -> None:
    """Draw a solid, and before it its reflection in the ground.

    The solid is shaded at twice the resolution and averaged, so that its edges are smooth.
    """
    size = len(canvas)
    scale = size / SIZE
    x = (solid.x * SIZE + 0.5) * scale  # centre, in pixels from the corner
    y = (base_y - 0.97 * radius + 0.5) * scale
    reach = int(np.ceil(radius * scale * 1.08))
    top = round(float(y)) - reach
    left = round(float(x)) - reach
    steps = (np.arange(4 * reach, dtype=np.float32) + 0.5) / 2
    across = ((left + steps - x) / (radius * scale)).astype(np.float32)[None]
    down = ((top + steps - y) / (radius * scale)).astype(np.float32)[:, None]
    across, down = np.broadcast_arrays(across, down)
    inside, normal = SURFACES[solid.shape](across, down, rng)
    facing = normal[inside].astype(np.float32)
    diffuse = np.clip(facing @ LIGHT, 0, 1)
    gloss = np.clip(facing @ LIGHT_HALF, 0, 1)
    base = np.asarray(RGB[solid.colour], np.float32) * np.asarray(SOLID_TINT[scene.sky], np.float32)
    colour = base * (0.42 + 0.62 * diffuse)[:, None]
    colour += ((0.75 * gloss**28 + 0.10 * gloss**5) if solid.finish == "shiny" else 0.05 * gloss**3)[:, None]
    fine = np.zeros((*inside.shape, 4), np.float32)  # red, green, blue and opacity at twice the resolution
    fine[inside, :3] = colour
    fine[inside, 3] = 1
    pixels = (fine[::2, ::2] + fine[1::2, ::2] + fine[::2, 1::2] + fine[1::2, 1::2]) / 4
    if share := REFLECTED.get(scene.ground):
        fading = share * np.linspace(1, 0.25, 2 * reach, dtype=np.float32)[:, None, None]
        _overlay_pixels(canvas, pixels[::-1] * fading, round(float(2 * base_y * scale)) - top - 2 * reach, left)
    _overlay_pixels(canvas, pixels, top, left)


def _overlay_pixels(canvas: Floats, pixels: Floats, top: int, left: int) -> None:
    """Draw pixels with opacity over the canvas; pixels outside the canvas are dropped.

    Args:
        canvas: image that is changed, `[size, size, 3]`.
        pixels: colours that are multiplied by their opacity, and the opacity, `[rows, columns, 4]`.
        top: canvas row of the first pixel row; may be negative.
        left: canvas column of the first pixel column; may be negative.
    """
    size = len(canvas)
    rows = slice(max(top, 0), min(top + pixels.shape[0], size))
    columns = slice(max(left, 0), min(left + pixels.shape[1], size))
    pixels = pixels[rows.start - top : rows.stop - top, columns.start - left : columns.stop - left]
    canvas[rows, columns] = canvas[rows, columns] * (1 - pixels[..., 3:]) + pixels[..., :3]


def _compute_sphere_surface(u: Floats, v: Floats, rng: np.random.Generator) -> tuple[Floats, Floats]:
    squared = u * u + v * v
    return squared < 1, np.stack([u, v, np.sqrt(np.clip(1 - squared, 0, 1))], -1)


def _compute_torus_surface(u: Floats, v: Floats, rng: np.random.Generator) -> tuple[Floats, Floats]:
    distance = np.hypot(u, v)
    tube = (distance - 0.66) / 0.32
    slope = tube / np.maximum(distance, 1e-3)
    return np.abs(tube) < 1, np.stack([slope * u, slope * v, np.sqrt(np.clip(1 - tube * tube, 0, 1))], -1)


def _compute_cone_surface(u: Floats, v: Floats, rng: np.random.Generator) -> tuple[Floats, Floats]:
    width = np.maximum((v + 1.0) / 1.74 * 0.86, 1e-3)
    side = np.clip(u / width, -1, 1)
    body = (v > -1) & (v < 0.74) & (np.abs(u) < width)
    foot = (v >= 0.74) & ((u / 0.86) ** 2 + ((v - 0.74) / 0.24) ** 2 < 1)
    return body | foot, np.stack([0.9 * side, np.full_like(u, -0.3), 0.9 * np.sqrt(1 - side * side)], -1)


def _compute_cylinder_surface(u: Floats, v: Floats, rng: np.random.Generator) -> tuple[Floats, Floats]:
    side = np.clip(u / 0.72, -1, 1)
    lid = side**2 + ((v + 0.74) / 0.24) ** 2 < 1
    body = (np.abs(u) < 0.72) & (v > -0.74) & (v < 0.74)
    foot = (v >= 0.74) & (side**2 + ((v - 0.74) / 0.24) ** 2 < 1)
    normal = np.stack([side, np.zeros_like(u), np.sqrt(1 - side * side)], -1)
    normal[lid] = (0.0, -0.95, 0.31)
    return body | foot | lid, normal


def _compute_cube_surface(u: Floats, v: Floats, rng: np.random.Generator) -> tuple[Floats, Floats]:
    corners = np.array([(x, y, z) for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)], float) * 0.66
    faces = [(0, 1, 3, 2), (4, 6, 7, 5), (0, 4, 5, 1), (2, 3, 7, 6), (0, 2, 6, 4), (1, 5, 7, 3)]
    return _compute_polyhedron_surface(u, v, corners, faces, yaw=rng.uniform(0.35, 1.15), pitch=0.42)


def _compute_pyramid_surface(u: Floats, v: Floats, rng: np.random.Generator) -> tuple[Floats, Floats]:
    base = [(x * 0.76, 0.78, z * 0.76) for x, z in ((-1, -1), (1, -1), (1, 1), (-1, 1))]
    corners = np.array([*base, (0.0, -1.0, 0.0)])
    faces = [(0, 1, 4), (1, 2, 4), (2, 3, 4), (3, 0, 4)]
    return _compute_polyhedron_surface(u, v, corners, faces, yaw=rng.uniform(0.35, 1.15), pitch=0.25)


def _compute_star_surface(u: Floats, v: Floats, rng: np.random.Generator) -> tuple[Floats, Floats]:
    angle = -np.pi / 2 + np.arange(10) * np.pi / 5
    reach = np.where(np.arange(10) % 2 == 0, 1.05, 0.52)
    corners = np.vstack([np.stack([reach * np.cos(angle), reach * np.sin(angle), np.zeros(10)], -1), (0, 0, 0.42)])
    faces = [(i, (i + 1) % 10, 10) for i in range(10)]
    return _compute_polyhedron_surface(u, v, corners, faces, yaw=rng.uniform(-0.25, 0.25), pitch=0.0)


def _compute_polyhedron_surface(
    u: Floats, v: Floats, corners: Floats, faces: Sequence[tuple[int, ...]], yaw: float, pitch: float
) -> tuple[Floats, Floats]:
    """Return where a rotated polyhedron covers the plane, bool `[rows, columns]`, and its surface normals there.

    Args:
        u: horizontal positions; 1 is the solid's radius.
        v: vertical positions, downwards.
        corners: corners of the polyhedron, `[corners, 3]`.
        faces: corner indices of each face.
        yaw: rotation about the vertical axis in radians, applied first.
        pitch: rotation about the horizontal axis in radians.
    """
    turn = np.array([[np.cos(yaw), 0, np.sin(yaw)], [0, 1, 0], [-np.sin(yaw), 0, np.cos(yaw)]])
    tilt = np.array([[1, 0, 0], [0, np.cos(pitch), np.sin(pitch)], [0, -np.sin(pitch), np.cos(pitch)]])
    points = corners @ turn.T @ tilt.T
    middle = points.mean(0)
    inside = np.zeros(u.shape, bool)
    normal = np.zeros((*u.shape, 3), np.float32)
    for face in faces:
        polygon = points[list(face)].astype(np.float32)
        facing = np.cross(polygon[1] - polygon[0], polygon[2] - polygon[1])
        facing /= np.linalg.norm(facing)
        if facing @ (polygon.mean(0) - middle) < 0:  # normals should point outwards
            facing = -facing
        if facing[2] <= 0.02:  # the viewer looks along the z axis and sees only faces with positive z
            continue
        ahead = np.roll(polygon, -1, axis=0)
        cross = [
            (b[0] - a[0]) * (v - a[1]) - (b[1] - a[1]) * (u - a[0]) for a, b in zip(polygon, ahead, strict=True)
        ]  # on which side of each edge a position lies; inside the face, all signs are equal
        in_face = np.logical_and.reduce([c >= 0 for c in cross]) | np.logical_and.reduce([c <= 0 for c in cross])
        inside |= in_face
        normal[in_face] = facing
    return inside, normal


SURFACES = {
    "sphere": _compute_sphere_surface,
    "cube": _compute_cube_surface,
    "cone": _compute_cone_surface,
    "cylinder": _compute_cylinder_surface,
    "pyramid": _compute_pyramid_surface,
    "torus": _compute_torus_surface,
    "star": _compute_star_surface,
}
