"""Images of prompts: the core's group ``media``. mlx-vlm's processors make tokens of them, and its models features.

Which tokens are an image's is known from its pixels alone, so a prompt can be compared with others, and its memory be
planned, before anything is computed. Everything but ``Images`` may be called from any thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from outcore.decode.media import VIRTUAL, plain
from outcore.engine.session import Session
from outcore.errors import PromptError, RequestError
from outcore.modules.mlx_lm_compat import classes_of
from outcore.text import one_line

from .formats import PictureError
from .pictures import read_picture
from .tower import tower_of

# Part of every image's digest; changed with each version that makes other features of the same pixels.
FORMAT = b"image 1"

MARKS = ("boi_token", "image_token")


def make(folder: Path, config: Mapping[str, Any]) -> ImageReader | None:
    """Returns what reads a model's images; None: it is not of mlx-vlm's types, or has no part for images."""
    if not config.get("vision_config"):
        return None
    try:
        model, arguments = classes_of(dict(config))
    except ValueError:
        return None  # a model with code of its own
    if not model.__module__.startswith("mlx_vlm."):
        return None
    return ImageReader(folder, cast(Any, arguments).from_dict(dict(config)).config)


@dataclass(frozen=True, eq=False)
class Image:
    """An image as the model's processor makes it, alone.

    Attributes:
        digest: of its pixels and of all else that the processor says of it.
        ids: tokens (tokens,) of a prompt with nothing but this image; ``places``: where its placeholders are.
        inputs: arguments of ``get_input_embeddings``, without the tokens.
        again: makes the same image where ``inputs`` has no pixels, but their shapes; None: it has them.
    """

    digest: bytes
    ids: np.ndarray[Any, Any]
    places: np.ndarray[Any, Any]
    inputs: dict[str, Any]
    again: Callable[[], Image] | None = None

    @property
    def virtual(self) -> list[int]:
        """The ids that stand for it in a prompt."""
        count, found = len(self.places), bytearray()
        for n in range(-(-count // 8)):
            found += hashlib.sha256(self.digest + n.to_bytes(4, "little")).digest()
        return cast(list[int], (np.frombuffer(found, "<u4")[:count] % VIRTUAL + VIRTUAL).tolist())


class ImageReader:
    """Reads images for the model in a folder; ``config``: mlx-vlm's configuration. A ``MediaReader``."""

    def __init__(self, folder: Path, config: Any) -> None:
        self._folder, self._config = folder, config
        given = (getattr(config, name, None) for name in ("image_token_index", "image_token_id"))
        self.placeholder = cast(int, next((each for each in given if each is not None), -1))

    @cached_property
    def processor(self) -> Any:
        from mlx_vlm.utils import load_image_processor, load_processor

        found: Any = load_processor(self._folder, add_detokenizer=False)
        if (own := load_image_processor(self._folder)) is not None:
            found.image_processor = own
        return found

    @cached_property
    def mark(self) -> str:
        """What the chat template writes for an image; without one, the placeholder."""
        tokenizer = getattr(self.processor, "tokenizer", self.processor)
        texts = []
        for parts in ([], [{"type": "image"}]):
            content = [*parts, {"type": "text", "text": "\N{BLACK SQUARE}"}]
            try:
                for template in (tokenizer, self.processor):
                    if getattr(template, "chat_template", None):
                        said = [{"role": "user", "content": content}]
                        texts.append(str(template.apply_chat_template(said, tokenize=False)))
                        break
            except Exception:  # a template is code that comes with the model: it raises what it likes
                break
        if len(texts) == 2 and (more := len(texts[1]) - len(texts[0])) > 0:
            at = next(i for i, (a, b) in enumerate(zip(texts[0] + "\0", texts[1], strict=False)) if a != b)
            # Where the mark begins as what follows it, it may be found one character late.
            for begin in range(at, -1, -1):
                found = texts[1][begin : begin + more]
                if texts[1][:begin] + texts[1][begin + more :] == texts[0] and self._core_in(found):
                    return found
        return self._core_in("") or str(tokenizer.convert_ids_to_tokens(self.placeholder))

    def _core_in(self, text: str) -> str:
        """Returns the part of a mark that the processor looks for, if ``text`` has it; of an empty one, the first."""
        tokenizer = getattr(self.processor, "tokenizer", self.processor)
        found = [getattr(each, name, None) for each in (self.processor, tokenizer) for name in MARKS]
        found += [tokenizer.convert_ids_to_tokens(self.placeholder), "<image>"]
        known = [each for each in found if isinstance(each, str) and each]
        return next((each for each in known if not text or each in text), "")

    def read(
        self, prompt: str | Sequence[int], pictures: Sequence[Any], *, special: bool = False
    ) -> tuple[list[int], list[Any]]:
        """Returns a prompt's tokens and its images. A prompt without placeholders begins with the images.

        Args:
            pictures: paths, bytes, PIL's images, or what this method has returned.
            special: the tokenizer adds a BOS token if the prompt has none.

        Raises:
            PromptError: there are not as many placeholders as pictures, or a picture cannot be read.
        """
        if not isinstance(pictures, list | tuple | Iterator):
            raise PromptError('images: give a list, such as ["photo.jpg"]')
        pictures = list(pictures)
        if not isinstance(prompt, str):
            if not all(isinstance(each, Image) for each in pictures):
                raise PromptError("images: give the prompt as text, or images that were read with these tokens")
            return list(prompt), list(pictures)
        core = self._core_in(self.mark)
        prompt = prompt if core in prompt else self.mark * len(pictures) + prompt
        if (count := prompt.count(core)) != len(pictures):
            why = f"the prompt has {count} places for images ({core}), and {len(pictures)} are given"
            why += f"; {core} in a text is a place, too: write it otherwise" if count > len(pictures) else ""
            raise PromptError(f"images: {why}")
        opened = [each if isinstance(each, Image) else _opened(each) for each in pictures]
        images = [self._image(each) for each in opened]
        ids = self._made(prompt, opened, special)["input_ids"][0]
        places = np.flatnonzero(ids == self.placeholder)
        virtual = [each for image in images for each in image.virtual]
        if len(virtual) != len(places):
            raise PromptError("images: the model's processor treats several images otherwise than each of them")
        tokens = cast(list[int], ids.tolist())
        for place, each in zip(places.tolist(), virtual, strict=True):
            tokens[place] = each
        if tokens[-1] >= VIRTUAL:
            raise PromptError("images: the prompt ends with an image; add some text")
        return tokens, images

    def media(self, tokens: Sequence[int], images: Sequence[Any]) -> Images:
        """Returns the media of a text, whose ``tokens`` have all ``images`` that ``read`` returned, in their order."""
        return Images(self.placeholder, tokens, images)

    def prompt(self, prompt: Any, images: Sequence[Any], history: Sequence[int]) -> tuple[list[int], Images]:
        """Returns the tokens of a prompt that continues ``history``, and the media of both: its images come first."""
        given = cast(list[int], prompt.tolist()) if isinstance(prompt, mx.array) else prompt
        tokens, read = self.read(given, images, special=True)
        return tokens, self.media([*history, *tokens], read)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], render: Callable[[Sequence[Mapping[str, Any]]], str], template: str
    ) -> tuple[str, list[int], Images]:
        """Returns the text, the tokens and the media of messages whose contents may have parts
        ``{"type": "image", "image": ...}``. ``template``: the source of the chat template that ``render`` applies.

        Raises:
            RequestError: a picture or their number does not fit.
        """
        parts = [part for m in messages if isinstance(m.get("content"), list) for part in m["content"]]
        pictures = [part["image"] for part in parts if part["type"] == "image"]
        try:
            if "image" not in template:  # it takes texts alone
                messages = [{**m, "content": _written(m.get("content"), self.mark)} for m in messages]
            text = render(messages)
            tokens, images = self.read(text, pictures)
            return text, tokens, self.media(tokens, images)
        except PromptError as e:
            raise RequestError(f"messages: {one_line(e)}", param="messages") from e

    def _image(self, given: Any) -> Image:
        made = self._made(self.mark, [given], special=False)
        ids = made.pop("input_ids")[0]
        made.pop("attention_mask", None)
        self.placeholder = int(made.pop("image_token_index", self.placeholder))
        places = np.flatnonzero(ids == self.placeholder)
        if not len(places):
            raise PromptError("images: the model's processor makes no tokens of an image")
        whole = hashlib.sha256(FORMAT + type(self.processor).__name__.encode())
        for part in _parts(made):
            whole.update(part)
        return Image(whole.digest(), ids, places, made)

    def _made(self, text: str, images: Sequence[Any], special: bool) -> dict[str, Any]:
        """Returns what the processor makes of a text and its images, as NumPy's arrays."""
        from mlx_vlm.utils import prepare_inputs

        try:
            try:
                made = prepare_inputs(
                    self.processor, images=list(images), prompts=[text], image_token_index=self.placeholder,
                    add_special_tokens=special,
                )  # fmt: skip
            except ValueError:  # LLaVA's takes no other arguments
                made = self.processor(images=list(images), text=[text])
            found = {name: _arrays(value) for name, value in made.items() if value is not None}
        except Exception as e:  # mlx-vlm's processors raise what they like
            raise PromptError(f"images: the model's processor refuses this: {one_line(e)}") from e
        # Some processors add a BOS token always, others as they are told.
        tokenizer = getattr(self.processor, "tokenizer", self.processor)
        bos, ids = tokenizer.bos_token_id, found["input_ids"]
        has = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
        if bos is not None and ids[0, 0] == bos and (not special or has) and (not has or ids[0, 1] == bos):
            found["input_ids"] = ids[:, 1:]
        return found


def _opened(given: Any) -> Any:
    """Returns an RGB image of PIL's."""
    from PIL import Image as pil

    if isinstance(given, pil.Image):
        return given if given.mode == "RGB" else given.convert("RGB")
    if not isinstance(given, str | bytes | Path):
        raise PromptError(f"images: give paths, bytes or Pillow's images, not {type(given).__name__}")
    try:
        return read_picture(given)
    except PictureError as e:
        raise PromptError(f"images: {one_line(e)}") from e


def _written(content: Any, mark: str) -> Any:
    """Returns a message's content as text, with a mark for each image."""
    if not isinstance(content, list):
        return content
    return "\n".join(part["text"] if part["type"] == "text" else mark for part in content)


def _arrays(value: Any) -> Any:
    """Returns NumPy's arrays instead of MLX's, which belong to the thread that made them."""
    if isinstance(value, mx.array):
        return np.array(value)
    if isinstance(value, list | tuple):
        return [_arrays(each) for each in value]
    return value


def _shapes(value: Any) -> Any:
    """Returns arrays of the same shapes and dtypes that take no memory."""
    if isinstance(value, list):
        return [_shapes(each) for each in value]
    return np.broadcast_to(np.zeros((), value.dtype), value.shape) if isinstance(value, np.ndarray) else value


def _parts(value: Any) -> Iterator[bytes | memoryview]:
    """Yields all of a tree of arrays as bytes, for a digest."""
    if isinstance(value, Mapping):
        for name in sorted(value):
            yield f"{name}:".encode()
            yield from _parts(value[name])
    elif isinstance(value, list):
        yield f"{len(value)} of".encode()
        for each in value:
            yield from _parts(each)
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype}{value.shape}".encode()
        yield np.ascontiguousarray(value).data
    else:
        yield repr(value).encode()


class Images:
    """The images of one text; the core's ``Media``. Methods but ``room`` run in the engine's thread."""

    def __init__(self, placeholder: int, tokens: Sequence[int], images: Sequence[Image]) -> None:
        self.placeholder, self.shift, self._images = placeholder, 0, tuple(images)
        self._tokens, self._ids = tokens, np.zeros((1, 0), np.int32)
        places = [n for n, token in enumerate(tokens) if token >= VIRTUAL]
        self._places: list[np.ndarray[Any, Any]] = []  # of each image, where its placeholders are in the text
        for image in self._images:
            mine, places = places[: len(image.places)], places[len(image.places) :]
            if [tokens[n] for n in mine] != image.virtual:
                raise PromptError("images: the tokens have other images")
            self._places.append(np.array(mine))
        if places:
            raise PromptError("images: the tokens have more images than were given")
        self._held = self._room = 0
        self._given: Callable[[int], None] | None = None  # told of room that is given back
        self._session: Session | None = None
        self._rows: dict[str, mx.array] = {}  # the model's arguments (1, tokens, ...) from ``_held`` on
        self._deep: list[mx.array] = []  # of each layer that is given images, rows of all places from ``_held`` on
        self._positions: mx.array | None = None

    def leave_out(self, again: Callable[[], Images]) -> None:
        """Frees the pixels. ``again`` makes the same images, when they are needed."""

        def later(n: int) -> Image:
            found = self._images[n]
            pixels = _shapes(found.inputs["pixel_values"])
            return replace(found, inputs=found.inputs | {"pixel_values": pixels}, again=lambda: again()._images[n])

        self._images = tuple(map(later, range(len(self._images))))

    def _needed(self, held: int) -> list[Image]:
        return [image for image, at in zip(self._images, self._places, strict=True) if at[-1] >= held]

    def room(self, model: nn.Module, held: int) -> int:
        needed = self._needed(held)
        return tower_of(model).room(needed, len(self._tokens) - held) if needed else 0

    def open(self, model: nn.Module, held: int, tokens: Sequence[int], hold: Callable[[int], None] | None) -> None:
        self.close()
        self._session, room = cast(Any, model).outcore, self.room(model, 0 if hold is None else held)
        if room and hold is not None:
            self._resize(room, hold)
        self._room, self._given = room, hold  # from here on ``close`` gives it back
        try:
            self._open(model, held, tokens)
        except BaseException:
            self.close()
            raise

    def _resize(self, more: int, hold: Callable[[int], None] | None) -> None:
        """Makes room for ``more`` bytes beside weights and caches, or gives it back if negative."""
        session = cast(Session, self._session)
        size = replace(session.size, kept=max(0, session.size.kept + more))
        if more > 0:
            session.residency.accommodate(size, [session.plan.prefill_step])
        if hold is not None:
            hold(more)
        if more < 0 and not session.closed:
            session.residency.release(size)

    def _open(self, model: nn.Module, held: int, tokens: Sequence[int]) -> None:
        tower, language = tower_of(model), cast(Any, model).language_model
        before = max(0, len(self._tokens) - len(tokens))
        text = plain(self, [*self._tokens[:before], *tokens])
        self._ids, self._held = np.array([text], np.int32), held
        ids = mx.array(self._ids)
        if hasattr(language, "get_rope_index"):
            grids = [image.inputs["image_grid_thw"] for image in self._images if "image_grid_thw" in image.inputs]
            grid = mx.array(np.concatenate(grids)) if len(grids) == len(self._images) else None
            found, shift = language.get_rope_index(ids, image_grid_thw=grid)
            mx.eval(found, shift)
            self._positions, self.shift = found, int(shift.item())
        if not (needed := self._needed(held)):
            return
        features = {image.digest: tower.features(image) for image in needed}
        self._rows = tower.text_rows(ids[:, held:])
        rows, deep = self._rows["inputs_embeds"], list[list[mx.array]]()
        for image, at in zip(self._images, self._places, strict=True):
            if at[-1] >= held:
                mine = features[image.digest]
                late = mx.array(np.flatnonzero(at >= held).astype(np.int32))
                rows[0, mx.array((at[at >= held] - held).astype(np.int32))] = mine["rows"][late].astype(rows.dtype)
                deep.append([mine[f"deep {n}"][late] for n in range(len(mine) - 1)])
        self._deep = [mx.concatenate(list(each)) for each in zip(*deep, strict=True)]
        self._rows["inputs_embeds"] = rows
        mx.eval(self._rows, self._deep)

    def arguments(self, first: int, ids: mx.array) -> tuple[mx.array, dict[str, Any]]:
        end, extra = first + ids.size, dict[str, Any]()
        if self.shift:
            extra["rope_deltas"] = mx.array([[self.shift]])
        if first >= self._ids.shape[1]:
            return ids, extra
        if end > self._ids.shape[1] or (self._rows and first < self._held):
            raise ValueError(f"tokens {first} to {end} of a text whose images are for {self._held} to {self._ids.size}")
        seen = self._ids[0, first:end]
        if self._positions is not None:
            extra["position_ids"] = self._positions[..., first:end]
        begin = first - self._held
        extra |= {name: rows[:, begin : begin + ids.size] for name, rows in self._rows.items()}
        if self._deep and (mask := seen == self.placeholder).any():
            passed = int((self._ids[0, self._held : first] == self.placeholder).sum())
            extra["visual_pos_masks"] = mx.array(mask[None])
            extra["deepstack_visual_embeds"] = [each[passed : passed + int(mask.sum())] for each in self._deep]
        return mx.array(seen), extra

    def close(self) -> None:
        self._rows, self._deep, room, self._room = {}, [], self._room, 0
        if room:
            self._resize(-room, self._given)
