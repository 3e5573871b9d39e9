"""Builds images by carrying out a Dockerfile's own steps on a bootstrapped base, without a container engine.

Every step's outcome is kept under a key made of everything that it depends on, so a step is done again only when its
text, its inputs or a step before it changed: a change of our code costs its last COPY or two.
"""

import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from elastipod_local import dockerfile
from elastipod_local.buildcontext import BuildContext
from elastipod_local.buildstep import SOURCE, BuildStep
from elastipod_local.dockerfile import Instruction, Stage
from elastipod_local.errors import LocalClusterError
from elastipod_local.host import Progress, delete_tree, is_open, quiet, run_logged, tail_of
from elastipod_local.oci import Blob, Image, ImageConfig, pack_layer
from elastipod_local.paths import PACKAGE
from elastipod_local.processes import isolated
from elastipod_local.registry_access import RegistryAccess

STEP_DEADLINE_S = 1800
LAYERS_KEPT = 120  # an image set needs about twenty
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
Bases = Mapping[str, Callable[[], Path]]


@dataclass(frozen=True, slots=True)
class Built:
    """A stage as far as it was carried out: its layers from the bottom up (cache keys) and its configuration."""

    layers: tuple[str, ...]
    config: ImageConfig = field(default_factory=lambda: ImageConfig(env={"PATH": DEFAULT_PATH}))
    arguments: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return self.layers[-1]

    def variables(self) -> dict[str, str]:
        return {**self.arguments, **self.config.env}


class ImageBuilder:
    """Builds stages of one Dockerfile into a cache folder.

    context: what COPY copies from. bases: for each image that a FROM may name, what makes its root folder in the
    cache and gives it. build_arguments: values for ARG, as of `docker build --build-arg`.
    """

    def __init__(
        self,
        cache: Path,
        context: BuildContext,
        bases: Bases,
        access: RegistryAccess,
        build_arguments: Mapping[str, str],
        progress: Progress = quiet,
    ) -> None:
        self._layers = cache / "layers"
        self._log = cache / "build.log"
        self._context = context
        self._bases = bases
        self._access = access
        self._build_arguments = build_arguments
        self._progress = progress
        self._layers.mkdir(parents=True, exist_ok=True)

    def build(self, stages: Mapping[str, Stage], targets: Iterable[str]) -> dict[str, Built]:
        """Carry out what the targets need and is not in the cache; gives them by name.

        Raises LocalClusterError naming the failing line.
        """
        done: dict[str, Built] = {}
        wanted = list(targets)
        for stage in (stage for target in wanted for stage in dockerfile.needed(stages, target)):
            if stage.name not in done:
                done[stage.name] = self._build_stage(stage, done)
        return {target: done[target] for target in wanted}

    def _build_stage(self, stage: Stage, done: Mapping[str, Built]) -> Built:
        built = replace(done.get(stage.base) or Built((self._base(stage.base),)), arguments={})
        for instruction in stage.instructions:
            built = self._carry_out(instruction, built, done, stage.name)
        return built

    def run_on(self, built: Built, command: tuple[str, ...], folder: Path, what: str) -> None:
        """Run a program of a built stage with a folder of this machine shown, writable, in SOURCE."""
        with tempfile.TemporaryDirectory(dir=self._layers, prefix="context-") as scratch:
            _make_open(Path(scratch) / "fs")
            step = replace(
                self._step(built, command, built.variables()),
                stage=f"{scratch}/scratch",
                upper=f"{scratch}/fs",
                user="",
                source=(str(folder),),
                source_writable=True,
            )
            self._perform(step, what)

    def image(self, built: Built, name: str) -> Image:
        """Give a built stage as an image of this name, with its layers packed."""
        blobs = []
        for key in built.layers:
            tar = self._layers / key / "layer.tar"
            if not tar.exists():
                pack_layer(self._layers / key / "fs", tar)
            blobs.append(Blob.of(tar))
        return Image(name, tuple(blobs), built.config)

    def delete_unused(self) -> None:
        """Delete all but the layers used last; every change of our code makes some."""
        by_use = sorted(self._layers.iterdir(), key=lambda layer: layer.stat().st_mtime, reverse=True)
        for layer in by_use[LAYERS_KEPT:]:
            delete_tree(layer)

    def _base(self, image: str) -> str:
        if image not in self._bases:
            raise LocalClusterError(
                f"the Dockerfile starts from {image!r}, which cannot be made here; it may use {', '.join(self._bases)}"
            )
        key = _hash(["base", image, platform.machine()])
        folder = self._layers / key
        if folder.exists():
            os.utime(folder)
        else:
            made = self._bases[image]()
            draft = Path(tempfile.mkdtemp(dir=self._layers, prefix="new-"))
            made.chmod(0o755)
            made.rename(draft / "fs")
            draft.rename(folder)
        return key

    def _carry_out(self, instruction: Instruction, built: Built, done: Mapping[str, Built], stage: str) -> Built:
        variables = built.variables()
        config = built.config
        words = tuple(dockerfile.expand(word, variables) for word in instruction.words)
        match instruction.name:
            case "ARG":
                given = {
                    name: self._build_arguments.get(name, value) for name, value in dockerfile.pairs(words).items()
                }
                return replace(built, arguments={**built.arguments, **given})
            case "ENV":
                return replace(built, config=replace(config, env={**config.env, **dockerfile.pairs(words)}))
            case "LABEL":
                return replace(built, config=replace(config, labels={**config.labels, **dockerfile.pairs(words)}))
            case "WORKDIR":
                return replace(built, config=replace(config, workdir=str(Path(config.workdir) / words[0])))
            case "USER":
                return replace(built, config=replace(config, user=words[0]))
            case "EXPOSE":
                return replace(built, config=replace(config, ports=(*config.ports, *words)))
            case "ENTRYPOINT":
                return replace(built, config=replace(config, entrypoint=instruction.words))
            case "CMD":
                return replace(built, config=replace(config, cmd=instruction.words))
            case "RUN":
                return self._run(instruction, built, stage)
            case "COPY":
                return self._copy(instruction, words, built, done, stage)
        raise AssertionError(f"the parser let {instruction.name} through")

    def _run(self, instruction: Instruction, built: Built, stage: str) -> Built:
        env = built.variables()
        key = _hash(["run", built.key, instruction.words, env, built.config.workdir, built.config.user])
        step = self._step(built, ("/bin/sh", "-c", instruction.words[0]), {"HOME": "/root", **env, **self._access.env})
        return self._layer(key, step, built, f"{stage}: RUN {instruction.words[0]}", instruction)

    def _copy(
        self, instruction: Instruction, words: tuple[str, ...], built: Built, done: Mapping[str, Built], stage: str
    ) -> Built:
        *sources, target = words
        if not target.startswith("/"):
            # A trailing slash or dot says that the target is a folder; pathlib would drop it.
            target = f"{built.config.workdir.rstrip('/')}/{target}"
        owner = instruction.flag("chown") or "0:0"
        came_from = instruction.flag("from")
        with tempfile.TemporaryDirectory(dir=self._layers, prefix="context-") as scratch:
            if came_from is None:
                identity = self._context.stage(sources, Path(scratch), instruction.line)
                layers: tuple[str, ...] = (scratch,)
            elif came_from in done:
                identity = done[came_from].key
                layers = self._folders(done[came_from])
            else:
                raise LocalClusterError(
                    f"Dockerfile line {instruction.line}: there is no stage {came_from!r} before it"
                )
            key = _hash(["copy", built.key, identity, sources, target, owner])
            command = ("/bin/sh", "-ec", _COPY_SCRIPT, "copy", owner, target, *sources)
            step = replace(self._step(built, command, {"PATH": DEFAULT_PATH}), source=layers, workdir="/", user="")
            return self._layer(key, step, built, f"{stage}: COPY {' '.join(words)}", instruction)

    def _step(self, built: Built, command: tuple[str, ...], env: dict[str, str]) -> BuildStep:
        config = built.config
        return BuildStep(
            stage="",
            lower=self._folders(built),
            upper="",
            command=command,
            env=env,
            workdir=config.workdir,
            user=config.user,
            files=self._access.files,
            source=(),
        )

    def _folders(self, built: Built) -> tuple[str, ...]:
        return tuple(str(self._layers / key / "fs") for key in reversed(built.layers))

    def _layer(self, key: str, step: BuildStep, built: Built, what: str, instruction: Instruction) -> Built:
        """Give `built` with the step's layer on top, carrying the step out unless its layer is in the cache."""
        folder = self._layers / key
        if folder.exists() and not is_open(folder / "fs"):
            delete_tree(folder)  # made under a strict umask, before steps had their own
        if folder.exists():
            os.utime(folder)
        else:
            self._progress(f"  image step {what[:100]}")
            draft = Path(tempfile.mkdtemp(dir=self._layers, prefix="new-"))
            try:
                _make_open(draft / "fs")
                where = replace(step, stage=str(draft / "scratch"), upper=str(draft / "fs"))
                self._perform(where, f"Dockerfile line {instruction.line}, {what}")
                shutil.rmtree(draft / "scratch")
                (draft / "what").write_text(what + "\n")
                draft.rename(folder)
            except BaseException:
                shutil.rmtree(draft, ignore_errors=True)
                raise
        return replace(built, layers=(*built.layers, key))

    def _perform(self, step: BuildStep, what: str) -> None:
        script = Path(step.stage) / "step.json"
        script.parent.mkdir()
        script.write_text(step.encode())
        script.chmod(0o600)
        with self._log.open("ab") as log:
            log.write(f"--- {what}\n".encode())
            log.flush()
            status = run_logged(
                isolated([sys.executable, "-m", "elastipod_local.buildstep", str(script)]),
                log,
                what=what[:120],
                timeout_s=STEP_DEADLINE_S,
                env={"PYTHONPATH": str(PACKAGE.parent)},
            )
        if status != 0:
            raise LocalClusterError(f"{what[:120]} failed: {tail_of(self._log, 8)}; log: {self._log}")


# As docker build: of a folder its content is copied, and a file goes into the target where that is a folder.
_COPY_SCRIPT = f"""
owner=$1; target=$2; shift 2
case "$target" in */|*/.) mkdir -p "$target";; *) mkdir -p "$(dirname "$target")";; esac
[ $# -eq 1 ] || mkdir -p "$target"
for pattern in "$@"; do
  for source in {SOURCE}/$pattern; do
    [ -e "$source" ] || {{ echo "$pattern was not found" >&2; exit 1; }}
    if [ -d "$source" ]; then
      mkdir -p "$target"
      cp -a --no-preserve=ownership "$source/." "$target"
    else
      cp -a --no-preserve=ownership "$source" "$target"
    fi
  done
done
[ "$owner" = 0:0 ] || chown -R "$owner" "$target"
"""


def _make_open(folder: Path) -> None:
    """Make the root folder of a layer, which every user of an image may enter whatever our umask is."""
    folder.mkdir()
    folder.chmod(0o755)


def _hash(parts: list[object]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:24]
