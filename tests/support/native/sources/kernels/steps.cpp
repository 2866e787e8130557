// Counts the instructions of a part of a program by letting it take one at a time: for those that valgrind does not
// know. The program raises SIGUSR1 before the part and after it.
//
//   steps COMMAND ARGUMENTS…      The count goes to stderr. Exits with 77 where the system forbids tracing.
#include <csignal>
#include <cstdio>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

int main(int count, char** arguments) {
  if (count < 2) return 2;
  const pid_t child = fork();
  if (child == 0) {
    if (ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) _exit(77);
    execv(arguments[1], arguments + 1);
    _exit(127);
  }
  int status = 0;
  long steps = 0;
  bool counting = false;
  for (waitpid(child, &status, 0); WIFSTOPPED(status); waitpid(child, &status, 0)) {
    if (WSTOPSIG(status) == SIGUSR1) counting = !counting;
    steps += counting;
    if (ptrace(counting ? PTRACE_SINGLESTEP : PTRACE_CONT, child, nullptr, nullptr) != 0) return 77;
  }
  std::fprintf(stderr, "%ld\n", steps);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}
