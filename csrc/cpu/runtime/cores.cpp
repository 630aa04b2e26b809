#include "cores.hpp"

#include <algorithm>
#include <fstream>
#include <map>

#include "work.hpp"

#if defined(__linux__)
#include <sched.h>
#endif

namespace qt {

const std::vector<int>& usable_processors() {
  static const std::vector<int> all = [] {
    std::vector<int> processors;
#if defined(__linux__)
    constexpr int kMost = 1 << 14;  // capacity of a 2 KiB mask; cpu_set_t has 1024
    std::vector<cpu_set_t> set(kMost / CPU_SETSIZE);
    const std::size_t bytes = set.size() * sizeof set[0];
    if (sched_getaffinity(0, bytes, set.data()) == 0)
      for (int processor = 0; processor < kMost; ++processor)
        if (CPU_ISSET_S(processor, bytes, set.data())) processors.push_back(processor);
#endif
    return processors;
  }();
  return all;
}

std::vector<int> in_order_of_cores(const std::vector<int>& processors, const std::string& system) {
  std::map<std::string, int> seen;  // number of processors seen of each core; key: list of siblings
  std::vector<std::pair<int, int>> order;
  for (const int processor : processors) {
    const std::string name = "cpu" + std::to_string(processor);
    std::ifstream file(system + "/devices/system/cpu/" + name + "/topology/thread_siblings_list");
    std::string siblings;
    if (!std::getline(file, siblings) || siblings.empty()) siblings = name;
    order.push_back({seen[siblings]++, processor});
  }
  std::stable_sort(order.begin(), order.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<int> ordered;
  for (const auto& [turn, processor] : order) ordered.push_back(processor);
  return ordered;
}

void stay_on(int processor) {
#if defined(__linux__)
  std::vector<cpu_set_t> set(processor / CPU_SETSIZE + 1);
  CPU_SET_S(processor, set.size() * sizeof set[0], set.data());
  sched_setaffinity(0, set.size() * sizeof set[0], set.data());  // on failure the thread keeps its affinity
#else
  (void)processor;
#endif
}

}  // namespace qt

// For tests: sorts `count` processors with qt::in_order_of_cores. system: path of sysfs.
QT_EXPORT void qt_in_order_of_cores(int* processors, index_t count, const char* system) {
  const std::vector<int> ordered = qt::in_order_of_cores({processors, processors + count}, system);
  std::copy(ordered.begin(), ordered.end(), processors);
}
