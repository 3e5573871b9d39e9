"""What the commands for data, samples and recipes say of themselves, word by word."""

from __future__ import annotations

import pytest

from elastipod import cli

HELP = {
    "tokens": """\
usage: elastipod tokens [-h] ACTION ...

Build and show token files: tokenized text for training.

positional arguments:
  ACTION
    build     build a token file from text
    show      show what a token file contains

options:
  -h, --help  show this help message and exit
""",
    "tokens build": """\
usage: elastipod tokens build [-h] [--tokenizer TOKENIZER] [--vocabulary VOCABULARY] [--end-of-document TOKEN]
                              [--workers WORKERS] [--lines] [--force]
                              output text [text ...]

Build a token file from text.

positional arguments:
  output                the file to write; it appears only when it is complete
  text                  text files, or folders with text files; each file is one document

options:
  -h, --help            show this help message and exit
  --tokenizer TOKENIZER
                        bytes (default), or MODULE:FUNCTION, a function that returns the tokens of a text
  --vocabulary VOCABULARY
                        number of different tokens (for bytes 256, or more with --end-of-document)
  --end-of-document TOKEN
                        a token to add after every document
  --workers WORKERS     number of processes that tokenize (default: 1); the file is the same for any number
  --lines               every line is one document; line ends are left out
  --force               replace an existing file
""",
    "tokens show": """\
usage: elastipod tokens show [-h] [--verify] file

Show what a token file contains.

positional arguments:
  file

options:
  -h, --help  show this help message and exit
  --verify    read the whole file and verify its checksum
""",
    "recipe": """\
usage: elastipod recipe [-h] COMMAND ...

Work with HyperPod recipes.

options:
  -h, --help  show this help message and exit

commands:
  COMMAND
    render    print the job of a recipe and the ConfigMap with the configuration of every size
""",
    "recipe render": """\
usage: elastipod recipe render [-h] --image IMAGE --script SCRIPT [--name NAME] [--namespace NAMESPACE]
                               [--queue QUEUE] [--ranks-per-node N] [--model-parallel N]
                               [--instance-type INSTANCE_TYPE] [--resource NAME=QUANTITY] [--claim CLAIM:PATH]
                               [--env NAME=VALUE]
                               FILE [PATH=VALUE ...]

Print the job of a recipe and the ConfigMap with the configuration of every size, for kubectl apply -f -. A recipe
that contradicts itself is refused, with what to change.

positional arguments:
  FILE                  the recipe, in YAML; - reads standard input
  PATH=VALUE            replace a value, for example elastic_policy.is_elastic=true

options:
  -h, --help            show this help message and exit
  --image IMAGE         image of the training container
  --script SCRIPT       script that hyperpodrun starts, with its arguments in one word
  --name NAME           name of the job (run.name of the recipe)
  --namespace NAMESPACE
                        namespace of both objects (kubectl's)
  --queue QUEUE         LocalQueue of Kueue (none)
  --ranks-per-node N    workers in each pod (trainer.devices)
  --model-parallel N    ranks of one model group, as spec.elastipod.parallelism (1)
  --instance-type INSTANCE_TYPE
                        node label node.kubernetes.io/instance-type (any node)
  --resource NAME=QUANTITY
                        a resource of each pod; may be repeated (nvidia.com/gpu, one for each rank)
  --claim CLAIM:PATH    a PersistentVolumeClaim and where it is mounted; may be repeated
  --env NAME=VALUE      a variable of the container; may be repeated
""",
    "audit": """\
usage: elastipod audit [-h] [--json] directory

Check from the sample logs of a job alone that the final weights contain every sample exactly once per epoch.

positional arguments:
  directory   the directory that the training script gave to SampleLog

options:
  -h, --help  show this help message and exit
  --json      print the whole report as JSON

exit status: 0 exactly once, 1 not exactly once, 2 the logs do not allow a verdict
""",
}


@pytest.mark.parametrize("command", HELP)
def test_help_says_what_each_command_takes(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*command.split(), "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.split() == HELP[command].split(), (
        "each version of Python breaks lines in its own way"
    )


@pytest.mark.parametrize(
    ("command", "lacks"),
    [
        ("tokens", "ACTION"),
        ("tokens build", "output, text"),
        ("tokens build out", "text"),
        ("tokens show", "file"),
        ("recipe", "COMMAND"),
        ("recipe render file.yaml", "--image, --script"),
        ("audit", "directory"),
    ],
)
def test_what_a_command_lacks_is_named(command: str, lacks: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(command.split())
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f": error: the following arguments are required: {lacks}\n")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("tokens build out text --vocabulary=many", "argument --vocabulary: invalid int value: 'many'"),
        ("tokens build out text --end-of-document=x", "argument --end-of-document: invalid int value: 'x'"),
        ("tokens build out text --workers=x", "argument --workers: invalid int value: 'x'"),
        ("recipe render f --ranks-per-node=0", "argument --ranks-per-node: '0' is no number of at least 1"),
        ("recipe render f --ranks-per-node=-1", "argument --ranks-per-node: '-1' is no number of at least 1"),
        ("recipe render f --model-parallel=two", "argument --model-parallel: 'two' is no number of at least 1"),
        ("recipe render f --resource=gpu", "argument --resource: 'gpu' is not of the form NAME=QUANTITY"),
        ("recipe render f --resource==1", "argument --resource: '=1' is not of the form NAME=QUANTITY"),
        ("recipe render f --claim=data:", "argument --claim: 'data:' is not of the form CLAIM:PATH"),
        ("recipe render f --env=A", "argument --env: 'A' is not of the form NAME=VALUE"),
        ("recipe render f --image=a --script=b --nonsense --more", "error: unrecognized arguments: --nonsense --more"),
    ],
)
def test_what_a_command_cannot_take_is_named(arguments: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments.split())
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f"{told}\n")
