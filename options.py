"""Options: the command line of `train.py`.

What each option means, which of them go together, and one clear line for those that do not. Only `train.py` needs it.
"""

import argparse

import mnist
from placement import CONTROLLER
from workers import is_address


def parse_arguments(argv):
    """The command line; argparse prints what is wrong with it and exits with code 2."""
    parser = argparse.ArgumentParser(
        prog="train.py",
        usage=argparse.SUPPRESS,  # an error is one line
        description="Trains the MNIST classifier, serially or on towers.",
    )
    add = parser.add_argument
    add("--parallel", action="store_true", help="one tower per device, instead of one device")
    add("--towers", type=positive(int, 256), metavar="N", help="number of towers (default: all GPUs; without a GPU, 2)")
    add("--asynchronous", action="store_true", help="towers do not wait for each other, each updates by itself")
    add(
        "--controller",
        type=names,
        default=[CONTROLLER],
        metavar="DEV",
        help="what holds the variables: a device, HOST:PORT, or several",
    )
    add(
        "--workers",
        type=names,
        default=[],
        metavar="HOST:PORT,...",
        help="towers on other machines, where --serve runs",
    )
    add(
        "--address",
        type=text,
        metavar="HOST",
        help="HOST or HOST:PORT under which the workers reach this machine, if not by route",
    )
    add(
        "--serve",
        type=positive(int, 65535),
        metavar="PORT",
        help="lend this machine's devices; needs --trusted-network",
    )
    add("--trusted-network", action="store_true", help="only trusted machines can reach this one")
    add("--epochs", type=positive(int), default=2, metavar="N", help="passes over the data (default: 2)")
    add("--batch-size", type=positive(int), default=128, metavar="N", help="images per tower and step (default: 128)")
    add("--learning-rate", type=positive(float), default=1e-3, metavar="X", help="Adam's (default: 0.001)")
    add("--data", type=text, default=mnist.DATA, metavar="DIR", help="folder of the four MNIST files (default: data)")
    add("--seed", type=seed, default=0, metavar="N", help="seed of the weights and of the order (default: 0)")
    add("--mixed-precision", action="store_true", help="compute in bfloat16, keep the weights in float32")
    add("--checkpoint-dir", type=text, metavar="DIR", help="save the run there, and go on with the run saved there")
    add("--checkpoint-every", type=positive(int), default=100, metavar="STEPS", help="how often (default: 100)")
    add("--deterministic", action="store_true", help="the same bits in every run, whatever it costs in speed")
    add("--save", type=text, metavar="FILE.keras", help="write the trained model, which takes floats from 0 to 1")
    add("--logdir", type=text, metavar="DIR", help="write curves, settings and the graph there, for TensorBoard")
    add("--explain", action="store_true", help="first measure where the time of a parallel step goes")
    add("--log-device-placement", action="store_true", help="log the device of every op")
    options = parser.parse_args(argv)
    for name in ("towers", "asynchronous", "controller", "explain", "workers"):
        if getattr(options, name) != parser.get_default(name) and not options.parallel and not options.serve:
            parser.error(f"--{name} needs --parallel")
    if options.serve and (options.parallel or options.workers):
        parser.error("--serve lends this machine and does not train: leave out --parallel and --workers")
    if options.serve and not options.trusted_network:
        parser.error(
            "--serve lets whoever can reach this machine run anything on it, as you: TensorFlow's server listens on "
            "all interfaces and asks for no password; give --trusted-network if that is only machines you trust"
        )
    servers = [controller for controller in options.controller if is_address(controller)]
    if (servers or options.address) and not options.workers:
        parser.error(f"{'--controller ' + servers[0] if servers else '--address'} needs --workers")
    options.machines = list(dict.fromkeys(options.workers + servers))
    for name in ("deterministic", "explain"):
        if options.asynchronous and getattr(options, name):
            parser.error(f"--{name} is for towers that wait for each other: leave out --asynchronous")
    if options.save and not options.save.endswith(".keras"):
        parser.error(f"--save needs a name that ends in .keras, not {options.save}")
    return options


# Types for argparse, which says of a ValueError, with the function's name: invalid positive int value: '0'


def positive(number, most=2**31 - 1):
    """A number above zero, and at most so large."""

    def parse(word):
        value = number(word)
        if value > most:
            raise argparse.ArgumentTypeError(f"{word} is more than {most}")
        if not value > 0:
            raise ValueError
        return value

    parse.__name__ = f"positive {number.__name__}"
    return parse


def seed(word):
    if int(word) == 0:
        return 0
    return positive(int)(word)


def text(word):
    if not word.strip():
        raise argparse.ArgumentTypeError("it is empty, like a variable of the shell that is not set")
    return word


def names(word):
    """Several, with commas between them."""
    if not all(map(str.strip, word.split(","))):
        raise argparse.ArgumentTypeError(f"a name is missing in {word!r}: write one, or several with commas between")
    return [name.strip() for name in word.split(",")]
