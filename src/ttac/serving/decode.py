"""Images out of request bodies, which may hold anything."""

from __future__ import annotations

import logging
from io import BytesIO

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import File, FormParser, parse_options_header
from torch import Tensor

from ttac.data.folder import UnreadableImageError, image_pixels, opened_image
from ttac.serving import jpeg
from ttac.serving.errors import RequestError
from ttac.serving.protocol import ServedModel

# Whatever a form holds is the client's affair, who is told.
logging.getLogger("python_multipart").setLevel(logging.ERROR)

# No TIFF and no PPM: tiles and frames of the one, and comments of the other, ask for more than their headers tell.
FORMATS = ("PNG", "JPEG", "BMP", "WEBP")
FIELD = b"file"
FORM = b"multipart/form-data"
# A progressive JPEG goes over all of its pixels once a scan, and a scan of nothing new takes but some bytes: a small
# file could keep a decoder busy for hours. Encoders write about ten scans, their optimisers a few dozen; a colour
# profile takes up to 255 segments.
MOST_SCANS = 64
MOST_SEGMENTS = 1024


def decode_image(content: bytes, model: ServedModel, max_pixels: int) -> Tensor:
    """Decode an image file to `[1, C, H, W]` in [0, 1], of the size that the model takes."""
    if not content:
        raise RequestError(400, "the body is empty: send an image file")
    channels, *size = model.shape
    if channels not in (1, 3):
        raise RequestError(400, f"image files have 1 or 3 channels, and the model takes {channels}: send a tensor")
    try:
        _check_scans(content)
        with opened_image(BytesIO(content), max_pixels, FORMATS) as image:
            # Cameras write several pictures into one JPEG file, a large one and its previews, as MPO.
            if image.format != "MPO" and _frames(image) != 1:
                raise UnreadableImageError("it has several frames; send one of them")
            return image_pixels(image, (size[0], size[1]), channels, model.crop_pct, max_pixels)[None]
    except UnreadableImageError as error:
        raise RequestError(400, f"the image cannot be used: {error}") from error


def _check_scans(content: bytes) -> None:
    if not content.startswith(jpeg.START):
        return
    try:
        scans = jpeg.count_scans(content, MOST_SEGMENTS)
    except ValueError as error:
        raise UnreadableImageError(f"the JPEG file has {error}") from error
    if scans > MOST_SCANS:
        raise UnreadableImageError(f"the JPEG file has {scans} scans, more than {MOST_SCANS}; save it anew")


def _frames(image: object) -> int:
    try:
        return int(getattr(image, "n_frames", 1))
    except Exception as error:  # decoders raise all kinds of errors on damaged files
        raise UnreadableImageError(f"{type(error).__name__}: {error}") from error


def uploaded_file(body: bytes, content_type: bytes) -> bytes:
    """Give the image file of a body: the field `file` of a form, or all of it.

    >>> form = b'--x\\r\\nContent-Disposition: form-data; name="file"; filename="a"\\r\\n\\r\\npixels\\r\\n--x--\\r\\n'
    >>> uploaded_file(form, b"multipart/form-data; boundary=x")
    b'pixels'
    """
    kind, options = parse_options_header(content_type)
    if kind.lower() != FORM:
        return body
    boundary = options.get(b"boundary", b"")
    if not boundary:
        raise RequestError(400, "the form has no boundary")
    files: list[bytes] = []
    ended: list[bool] = []

    def take(name: bytes | None, content: bytes | None) -> None:
        if name != FIELD or files:
            raise ValueError("it must have one field, named 'file'")
        files.append(content or b"")

    try:
        parser = FormParser(
            "multipart/form-data",
            on_field=lambda field: take(field.field_name, field.value),
            on_file=lambda file: take(file.field_name, _content(file)),
            on_end=lambda: ended.append(True),
            boundary=boundary,
            config={"MAX_MEMORY_FILE_SIZE": len(body)},  # larger ones would go to disk
        )
        parser.write(body)
        parser.finalize()
    except (FormParserError, ValueError) as error:
        raise RequestError(400, f"the form cannot be read: {error}") from error
    if not (files and ended):
        raise RequestError(400, "the form has no whole field 'file'")
    return files[0]


def _content(file: File) -> bytes:
    file.file_object.seek(0)
    return file.file_object.read()
