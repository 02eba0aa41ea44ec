// Work in a forked child, for the tests of forks and signals.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>

#include "check.h"

// How a child ends that does `work`, as waitpid reports it; SIGALRM ends one that hangs.
template <typename Work>
int end_of(Work work) {
  std::fflush(nullptr);
  pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    alarm(60);
    work();
    _exit(0);
  }
  int status = 0;
  CHECK_EQ(waitpid(child, &status, 0), child);
  return status;
}

// Does `work` in a child that has to end well: an abort or a deadlock there fails here.
template <typename Work>
void in_child(Work work) {
  int status = end_of(work);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}
