"""A library of kernels whose loading crashes, aborts, hangs or prints, as LOCALATTN_TEST_DEATH says."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from .run_folder import once

SOURCE = r"""
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <csignal>
#include <exception>
#include <new>
#include <unistd.h>

static void say(const char* text) { if (write(2, text, std::strlen(text)) < 0) _exit(99); }

extern "C" void* RegisterCustomOps(void*, const void*) {
  const char* death = std::getenv("LOCALATTN_TEST_DEATH");
  if (!death) return nullptr;
  const char* folder = std::getenv("LOCALATTN_TEST_FOLDER");
  if (folder) std::fclose(std::fopen(folder, "w"));
  if (!std::strcmp(death, "segv")) *reinterpret_cast<volatile int*>(8) = 1;
  if (!std::strcmp(death, "noise")) { say("loading \x1b[32m\xe2\x9c\x93\x1b[0m half a line"); raise(SIGSEGV); }
  if (!std::strcmp(death, "abort")) std::abort();
  if (!std::strcmp(death, "bus")) raise(SIGBUS);
  if (!std::strcmp(death, "ill")) __builtin_trap();
  if (!std::strcmp(death, "fpe")) raise(SIGFPE);
  if (!std::strcmp(death, "killed")) raise(SIGKILL);
  if (!std::strcmp(death, "cpu")) raise(SIGXCPU);
  if (!std::strcmp(death, "exit")) _exit(0);
  if (!std::strcmp(death, "exit1")) std::_Exit(1);
  if (!std::strcmp(death, "terminate")) std::terminate();
  if (!std::strcmp(death, "rust_memory")) {
    say("memory allocation of 16384081920 bytes failed\n");
    std::abort();
  }
  if (!std::strcmp(death, "memory")) {  // what the limit of `ulimit -v` does not give
    struct Fault { ~Fault() noexcept { new char[1ULL << 40]; } } fault;
  }
  if (!std::strcmp(death, "hang")) for (;;) pause();
  if (!std::strcmp(death, "deaf")) {
    signal(SIGINT, SIG_IGN); signal(SIGTERM, SIG_IGN); signal(SIGHUP, SIG_IGN);
    for (;;) pause();
  }
  if (!std::strcmp(death, "brood")) {
    if (!fork()) { if (!fork()) { setsid(); signal(SIGTERM, SIG_IGN); for (;;) pause(); } _exit(0); }
    raise(SIGSEGV);
  }
  if (!std::strcmp(death, "prints"))
    say("a \x1b[1;31mname\x1b[0m\n  \xe2\x9c\x93 parity  max error 0\n\x1b[2J\xe2\x80\xae\n");
  if (!std::strcmp(death, "panic")) {
    say("\nthread '<unnamed>' (12) panicked at src/lib.rs:1:2:\nindex out of bounds\n");
    say("note: run with `RUST_BACKTRACE=1` environment variable to display a backtrace\nafter it\n");
  }
  return nullptr;
}
extern "C" const char* localattn_instruction_set() { return "none"; }
"""


def dying_library() -> Path:
    """The library, compiled once a run; skips the test without a compiler."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ compiles the library that dies")

    def make(folder: Path) -> None:
        source = folder / "dying.cpp"
        source.write_text(SOURCE)
        subprocess.run([compiler, "-shared", "-fPIC", "-o", str(folder / "dying.so"), str(source)], check=True)

    return once("dying_library", make) / "dying.so"
